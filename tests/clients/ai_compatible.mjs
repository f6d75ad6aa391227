import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const { BASE_URL, MODEL, PROMPT } = process.env;
const served = createOpenAICompatible({ name: "draftsmith", baseURL: BASE_URL });
const asked = { model: served(MODEL), prompt: PROMPT, temperature: 0, maxOutputTokens: 16 };

const { text } = await generateText(asked);
let streamed = "";
for await (const part of streamText(asked).textStream) streamed += part;
if (streamed !== text) throw new Error(`stream: ${streamed}`);
console.log(text);
