// Follows /live and shows the state of the run. Everything that the run writes is text here, never
// markup.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 100;
const COLOURS = 5;
const STALE_SECONDS = 120;
const $ = (id) => document.getElementById(id);

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function number(value, digits = 2) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

function short(value) {
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

function showProgress(state) {
  const { progress, stages } = state;
  const place = stages.findIndex((stage) => stage.state === "begun");
  const running = place >= 0 && !state.finished;
  const stage = running ? `stage ${place + 1} of ${stages.length}, ${stages[place].name}` : "";
  const active = progress !== null && !state.finished;
  if (state.finished) {
    $("what").textContent = "finished";
  } else {
    const left = active && progress.seconds_left !== null && progress.done < progress.total
      ? `, ${duration(progress.seconds_left)} left of this` : "";
    const all = active && progress.run_seconds_left
      ? `, about ${duration(progress.run_seconds_left)} left of the run` : "";
    const doing = active
      ? `${progress.what}: ${progress.done} of ${progress.total}${left}${all}` : "";
    $("what").textContent = [stage, doing].filter(Boolean).join(" – ") || "waiting";
  }
  $("bar").hidden = !active;
  if (active) {
    $("bar").max = Math.max(progress.total, 1);
    $("bar").value = progress.done;
  }
  const silent = active && progress.age > STALE_SECONDS;
  $("note").textContent = active ? progress.note : "";
  $("problem").textContent = silent
    ? `no progress for ${duration(progress.age)}: the run may have stopped` : "";
}

function showStages(stages) {
  $("stages").replaceChildren(...stages.map((stage) => {
    const parts = [`${stage.name} (${stage.kind}): ${stage.state}`];
    if (stage.seconds !== null) parts.push(duration(stage.seconds));
    if (stage.peak_memory_bytes !== null) {
      parts.push(`peak ${(stage.peak_memory_bytes / 2 ** 30).toFixed(1)} GiB`);
    }
    return element("li", { className: stage.state, textContent: parts.join(", ") });
  }));
}

function showEvaluations(rows) {
  $("disturbed").hidden = !rows.some((row) => row.speedup !== null && row.alone === false);
  $("evaluations").replaceChildren(...rows.map((row) => {
    const interval = row.speedup?.low === undefined ? ""
      : ` [${number(row.speedup.low)}, ${number(row.speedup.high)}]`;
    const star = row.alone === false ? "*" : "";
    const speed = row.speedup === null ? "–" : `${number(row.speedup.value)}×${interval}${star}`;
    const cells = [
      row.stage,
      row.drafter + (row.lossless === false ? " (LOSSY)" : ""),
      number(row.acceptance_rate),
      number(row.tokens_per_step),
      speed,
    ];
    return element("tr", {}, ...cells.map((cell) => element("td", { textContent: cell })));
  }));
}

function curve({ stage, figure, lines }) {
  const points = Object.values(lines).flat();
  const steps = points.map((point) => point[0]);
  const values = points.map((point) => point[1]);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const [low, high] = [Math.min(...values), Math.max(...values)];
  // A single step or value stands in the middle.
  const share = (value, least, most) => (most > least ? (value - least) / (most - least) : 0.5);
  const x = (step) => WIDTH * share(step, first, last);
  const y = (value) => HEIGHT - 2 - (HEIGHT - 4) * share(value, low, high);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const keys = element("div", { className: "keys" });
  Object.entries(lines).forEach(([name, line], index) => {
    const colour = `line-${index % COLOURS}`;
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", colour);
    // One point is a dot: a line of no length with round ends.
    path.classList.toggle("dot", line.length === 1);
    const drawn = line.length === 1 ? [line[0], line[0]] : line;
    path.setAttribute("d", drawn.map(([s, v], i) => `${i ? "L" : "M"}${x(s)} ${y(v)}`).join(""));
    svg.append(path);
    const text = `${name} ${short(line.at(-1)[1])}`;
    keys.append(element("span", { className: `key ${colour}`, textContent: text }));
  });
  const ends = (className, values) => element("div", { className },
    ...[...new Set(values)].map((value) => element("span", { textContent: value })));
  const caption = element("figcaption", { textContent: `${stage}: ${figure}` });
  const plot = element("div", { className: "plot" }, ends("values", [short(high), short(low)]), svg,
    ends("steps", [...new Set([first, last])].map((step) => `step ${step}`)));
  return element("figure", {}, caption, plot, keys);
}

function showLog(lines) {
  const log = $("log");
  const text = lines.join("\n");
  if (log.textContent === text) return;
  const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
  log.textContent = text;
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function show(state) {
  document.title = `${state.name} – draftsmith watch`;
  $("name").textContent = state.name;
  $("about").textContent = `${state.target} · ${state.directory}`;
  showProgress(state);
  showStages(state.stages);
  showEvaluations(state.evaluations);
  $("curves").replaceChildren(...state.curves.map(curve));
  showLog(state.log);
}

const live = new EventSource("live");
live.addEventListener("message", (event) => show(JSON.parse(event.data)));
live.addEventListener("error", () => {
  $("problem").textContent = "no connection to draftsmith watch; trying again";
});
