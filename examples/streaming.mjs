// A stream of tokens in JavaScript, with nothing but fetch: Node 18 or newer, Deno, Bun, a browser.
//
//     node examples/streaming.mjs http://localhost:8000 chinese "美国的首都在哪里?"
//
// A page in a browser needs its origin in the server's setting `cors_origins`.

/** Yields the texts of a streamed chat completion. Throws an Error with the server's message. */
export async function* streamChat(url, { apiKey = "none", signal, ...body }) {
  const response = await fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${apiKey}` },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  if (!response.ok) {
    const { error } = await response.json().catch(() => ({ error: null }));
    throw new Error(`${response.status}: ${error?.message ?? response.statusText}`);
  }
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    // An error after the first token comes as an event, because the status was sent before.
    if (event.error) throw new Error(event.error.message);
    const text = event.choices[0]?.delta.content;
    if (text) yield text;
  }
  throw new Error("the connection ended before the completion did");
}

/** Yields the data of server-sent events. A chunk of bytes may end within an event or a letter. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice("data: ".length);
      }
    }
  } finally {
    // Who stops reading early ends the request, and the server computes no more of it.
    await reader.cancel();
  }
}

const [url = "http://localhost:8000", model = "chinese", prompt = "美国的首都在哪里?"] =
  process.argv.slice(2);
try {
  const texts = streamChat(url, {
    model,
    messages: [{ role: "user", content: prompt }],
    max_tokens: 64,
    temperature: 0,
    signal: AbortSignal.timeout(60_000),
  });
  for await (const text of texts) process.stdout.write(text);
  process.stdout.write("\n");
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
}
