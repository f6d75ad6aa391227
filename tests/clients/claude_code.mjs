// A coding agent: one question, without tools, since its own need a long prompt.
import { spawnSync } from "node:child_process";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const place = dirname(fileURLToPath(import.meta.url));
const own = {
  ANTHROPIC_BASE_URL: process.env.BASE_URL.replace(/\/v1$/, ""),
  ANTHROPIC_API_KEY: "none",
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  CLAUDE_CODE_MAX_OUTPUT_TOKENS: "1500",
};
const asked = ["-p", process.env.PROMPT, "--model", process.env.MODEL];
const ran = spawnSync(
  join(place, "node_modules", ".bin", "claude"),
  [...asked, "--system-prompt", "Answer in one sentence.", "--tools", ""],
  { env: { ...process.env, ...own }, encoding: "utf8", stdio: ["ignore", "pipe", "inherit"] },
);
if (ran.status !== 0) throw new Error(ran.stdout);
console.log(ran.stdout);
