import OpenAI from "openai";

const { BASE_URL, MODEL, PROMPT } = process.env;
const client = new OpenAI({ baseURL: BASE_URL, apiKey: "none" });
const asked = { model: MODEL, temperature: 0 };
const messages = [{ role: "user", content: PROMPT }];

const chat = await client.chat.completions.create({ ...asked, messages, max_completion_tokens: 16 });
const answer = chat.choices[0].message.content;
let streamed = "";
for await (const chunk of await client.chat.completions.create({
  ...asked, messages, max_completion_tokens: 16, stream: true,
})) streamed += chunk.choices[0]?.delta?.content ?? "";
if (streamed !== answer) throw new Error(`stream: ${streamed}`);
const response = await client.responses.create({ ...asked, input: PROMPT, max_output_tokens: 16 });
if (response.output_text !== answer) throw new Error(`responses: ${response.output_text}`);
console.log(answer);
