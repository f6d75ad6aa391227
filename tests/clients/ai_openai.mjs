import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai";

const { BASE_URL, MODEL, PROMPT } = process.env;
const served = createOpenAI({ baseURL: BASE_URL, apiKey: "none" });
const asked = { model: served(MODEL), prompt: PROMPT, temperature: 0, maxOutputTokens: 16 };

const { text } = await generateText(asked);
let streamed = "";
for await (const part of streamText(asked).textStream) streamed += part;
if (streamed !== text) throw new Error(`stream: ${streamed}`);
console.log(text);
