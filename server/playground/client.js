// Talks to the server this page came from. Addresses are relative, so it works behind a prefix too.

/** What went wrong, in words; `status` is HTTP's, or 0 when nothing answered or the connection broke. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// What /health calls the times in which a server does not serve.
const STATES = { loading: "the models are still being loaded", draining: "it is shutting down" };

export const apiKey = {
  get: () => sessionStorage.getItem("dspark.key") ?? "",
  set: (key) => sessionStorage.setItem("dspark.key", key),
};

/** The events of POST /generate, as they come. Throws ServerError, or AbortError when `signal` stops it. */
export async function* generate(body, signal) {
  const init = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal };
  const response = await request("generate", init);
  let done = false;
  for await (const data of sseData(response.body)) {
    done ||= data === "[DONE]";
    if (done) continue; // to the very end: a connection that is dropped looks like a client that hung up
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(event.error.message, response.status);
    yield event;
  }
  if (!done) throw new ServerError("The connection broke before the answer had ended.", 0);
}

/** Throws ServerError when the server does not answer (status 0) or says that it cannot serve. */
export async function health() {
  await request("health", { signal: AbortSignal.timeout(5000) });
}

/** The name of the served model. */
export async function modelName() {
  const response = await request("v1/models");
  return (await response.json()).data[0].id;
}

async function request(path, init = {}) {
  const key = apiKey.get();
  const headers = { ...init.headers, ...(key && { authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...init, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer.", 0);
  }
  if (!response.ok) throw new ServerError(await complaint(response), response.status);
  return response;
}

async function complaint(response) {
  try {
    const { error, status } = await response.json();
    return error?.message ?? STATES[status] ?? status;
  } catch {
    return `The server answered ${response.status} ${response.statusText}.`;
  }
}

async function* sseData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const event of events) if (event.startsWith("data: ")) yield event.slice("data: ".length);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection broke before the answer had ended.", 0);
  } finally {
    reader.cancel().catch(() => {}); // a stream that failed cannot be cancelled, and need not be
  }
}
