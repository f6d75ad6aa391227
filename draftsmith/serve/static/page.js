// Text of models and requests reaches the document only as text (`textContent`, `append`), never as
// HTML. The key stays in this variable.
let key = "";
let asking = null;
let stopping = null;
const messages = [];
const $ = (id) => document.getElementById(id);

function element(tag, fields = {}, ...children) {
  const node = Object.assign(document.createElement(tag), fields);
  node.append(...children);
  return node;
}

// --- requests ------------------------------------------------------------------------------------

function askForKey() {
  asking ??= new Promise((resolve) => {
    $("key-dialog").oncancel = (event) => event.preventDefault();
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      key = $("key").value;
      $("key").value = "";
      $("key-dialog").close();
      asking = null;
      resolve();
    };
    $("key-dialog").showModal();
  });
  return asking;
}

async function call(path, body, signal) {
  for (;;) {
    const used = key;
    const headers = used ? { authorization: `Bearer ${used}` } : {};
    const options = { headers, signal };
    if (body) {
      headers["content-type"] = "application/json";
      Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    }
    const response = await fetch(path, options);
    if (response.status === 401) {
      if (key === used) await askForKey();
    } else if (!response.ok) {
      throw new Error((await response.json()).error.message);
    } else {
      return response;
    }
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: {")) yield JSON.parse(part.slice("data: ".length));
    }
  }
}

function complain(error) {
  $("problem").textContent = error.message;
}

// --- chat ----------------------------------------------------------------------------------------

function tokenSpan({ text, origin, rejected }) {
  const span = element("span", { className: origin, textContent: text });
  if (rejected.length) {
    span.classList.add("replaced");
    span.title = `rejected: ${rejected.map((one) => JSON.stringify(one)).join(" ")}`;
    span.dataset.rejected = rejected.join("");
  }
  return span;
}

function addMessage(role, ...children) {
  const message = element("div", { className: `message ${role}` }, ...children);
  $("chat").append(message);
  return message;
}

// Not the share of the draft tokens: of a tree, most can never be accepted.
function figuresOf({ steps, accepted }, seconds) {
  const mean = steps ? `, ${(accepted / steps).toFixed(2)} draft tokens accepted per step` : "";
  return `${steps} steps${mean}, ${seconds.toFixed(1)} s`;
}

async function answer(question) {
  const temperature = $("temperature").value;
  const begun = performance.now();
  stopping = new AbortController();
  messages.push({ role: "user", content: question });
  addMessage("user", question);
  const message = addMessage("assistant");
  let text = "";
  try {
    const request = {
      model: $("model").textContent,
      messages,
      stream: true,
      draftsmith: { trace: true },
      max_completion_tokens: Number($("max-tokens").value) || undefined,
      temperature: temperature === "" ? undefined : Number(temperature),
    };
    const response = await call("v1/chat/completions", request, stopping.signal);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const tokens = event.choices.flatMap((choice) => choice.draftsmith?.tokens ?? []);
      message.append(...tokens.map(tokenSpan));
      text += tokens.map((token) => token.text).join("");
      if (event.draftsmith) {
        const textContent = figuresOf(event.draftsmith, (performance.now() - begun) / 1000);
        message.append(element("span", { className: "figures", textContent }));
      }
      $("chat").scrollTop = $("chat").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") complain(error);
  }
  // Without an answer, the question would stay before the next one.
  if (text) messages.push({ role: "assistant", content: text });
  else messages.pop();
}

function prepareChat() {
  $("ask").onsubmit = async (event) => {
    event.preventDefault();
    const question = $("prompt").value;
    $("prompt").value = $("problem").textContent = "";
    $("send").disabled = $("clear").disabled = true;
    $("stop").disabled = false;
    await answer(question);
    $("send").disabled = $("clear").disabled = false;
    $("stop").disabled = true;
  };
  $("prompt").onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!$("send").disabled) $("ask").requestSubmit();
  };
  $("stop").onclick = () => stopping.abort();
  $("clear").onclick = () => {
    messages.length = 0;
    $("chat").replaceChildren();
  };
  $("show-rejected").onchange = (event) => $("chat").classList.toggle("rejects", event.target.checked);
}

// --- settings ------------------------------------------------------------------------------------

// What a JSON schema of one field asks for: numbers, a choice, a switch, else text.
function control(name, schema) {
  if (schema.enum) {
    const options = schema.enum.map((value) => element("option", { value, textContent: value }));
    return element("select", { name }, ...options);
  }
  if (schema.type === "boolean") return element("input", { name, type: "checkbox" });
  if (schema.maximum !== undefined) {
    const step = schema.maximum / 20;
    return element("input", { name, type: "range", step, min: step, max: schema.maximum });
  }
  if (schema.type === "integer" || schema.type === "number") {
    const step = schema.type === "integer" ? 1 : "any";
    return element("input", { name, type: "number", step, min: schema.minimum ?? "" });
  }
  const list = element("datalist", { id: `known-${name}` });
  list.append(...(schema.examples ?? []).map((value) => element("option", { value })));
  const input = element("input", { name, type: "text" });
  input.setAttribute("list", list.id);
  input.append(list);
  return input;
}

function valueOf(input) {
  if (input.type === "checkbox") return input.checked;
  return ["number", "range"].includes(input.type) ? Number(input.value) : input.value;
}

function nameOf(input) {
  const value = input.type === "range" ? ` ${input.value}` : "";
  return input.name.replaceAll("_", " ") + value;
}

function showSettings(settings, inputs, changed) {
  for (const input of inputs) {
    // Someone is typing in it.
    if (input === document.activeElement && input !== changed) continue;
    if (input.type === "checkbox") input.checked = Boolean(settings[input.name]);
    else input.value = settings[input.name] ?? "";
    input.labels[0].textContent = nameOf(input);
  }
  const plain = Object.entries(settings).filter(
    ([name, value]) => ["string", "number"].includes(typeof value) && !inputs.some((x) => x.name === name),
  );
  $("facts").replaceChildren(
    ...plain.flatMap(([name, value]) => [
      element("dt", { textContent: name.replaceAll("_", " ") }),
      element("dd", { textContent: value }),
    ]),
  );
}

async function prepareSettings() {
  const { changeable, ...settings } = await (await call("admin/settings")).json();
  const inputs = Object.entries(changeable).map(([name, schema]) => control(name, schema));
  for (const input of inputs) {
    const { name } = input;
    input.id = `setting-${name}`;
    input.onchange = async () => {
      $("problem").textContent = "";
      const sent = valueOf(input);
      try {
        const changed = await call("admin/settings", { [name]: sent });
        Object.assign(settings, await changed.json());
      } catch (error) {
        complain(error);
      }
      // Not over what was typed in the meantime.
      showSettings(settings, inputs, valueOf(input) === sent ? input : null);
    };
    const label = element("label", { htmlFor: input.id });
    input.oninput = () => (label.textContent = nameOf(input));
    $("controls").append(label, input);
  }
  showSettings(settings, inputs);
}

// --- live figures --------------------------------------------------------------------------------

const POINTS = 120; // one minute
const WINDOW = 4; // events between the two that a rate is computed from: two seconds
// Of the figures now, and of what was counted in the window. A figure that is missing has no plot.
const PLOTS = [
  ["acceptance rate α", (now, counted) => counted.accepted / counted.reached],
  ["tokens per step", (now, counted) => counted.emitted / counted.steps],
  ["draft length limit γ", (now) => now.gamma],
  ["draft tokens per step", (now, counted) => counted.drafted / counted.steps],
  ["tokens per second", (now, counted) => counted.generated / counted.seconds],
  ["texts that run", (now) => now.running],
  ["texts that wait", (now) => now.waiting],
  ["drafter version", (now) => now.drafter_version],
  ["learning rounds", (now) => now.learning_rounds],
];

class Plot {
  constructor(title) {
    this.values = [];
    this.output = element("output");
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", `0 0 ${POINTS - 1} 30`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    this.path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    svg.append(this.path);
    const caption = element("figcaption", {}, element("span", { textContent: title }), this.output);
    $("plots").append(element("figure", {}, caption, svg));
  }

  add(value) {
    this.values = [...this.values, value].slice(-POINTS);
    const isWhole = Number.isInteger(value);
    this.output.textContent = Number.isFinite(value) ? value.toFixed(isWhole ? 0 : 2) : "–";
    const top = Math.max(1, ...this.values.filter(Number.isFinite));
    const first = POINTS - this.values.length;
    let draws = false; // a gap where nothing was decoded
    const steps = this.values.map((one, place) => {
      if (!Number.isFinite(one)) {
        draws = false;
        return "";
      }
      const step = `${draws ? "L" : "M"}${first + place} ${29 - (28 * one) / top}`;
      draws = true;
      return step;
    });
    this.path.setAttribute("d", steps.join(""));
  }
}

async function follow() {
  const plots = new Map();
  for (;;) {
    const seen = [];
    try {
      for await (const now of events(await call("live"))) {
        const before = seen.at(-WINDOW) ?? seen[0] ?? now;
        const counted = {};
        for (const name of Object.keys(now)) counted[name] = now[name] - before[name];
        for (const [title, figure] of PLOTS) {
          const value = figure(now, counted);
          if (value === undefined) continue;
          if (!plots.has(title)) plots.set(title, new Plot(title));
          plots.get(title).add(value);
        }
        seen.splice(0, Math.max(seen.length - WINDOW, 0));
        seen.push(now);
      }
    } catch {
      // The service is away: it is asked again.
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

async function start() {
  prepareChat();
  try {
    $("model").textContent = (await (await call("v1/models")).json()).data[0].id;
    await prepareSettings();
  } catch (error) {
    complain(error);
  }
  follow();
}

start();
