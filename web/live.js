// What comes, as it comes: the event stream by fetch, since EventSource can't say who is asking.
//
// Nothing is lost between two streams: each begins with what came since the newest item known here. Where the server
// tells of a gap, a catch-up reads what it may have left out. What comes twice is dropped by the feed.

import { call, newest, send } from "./api.js";

const SILENT_MS_MAX = 20_000; // a heartbeat comes every few seconds
const WAIT_MS = 500;
const WAIT_MS_MAX = 20_000;
const HIDDEN_MS_MAX = 60_000;
const CATCH_UP_PAGES = 50;
const CATCH_UP_MAX = 500;
const CATCH_UP_LIMIT = 100;
const EVENT_CHARS_MAX = 1_000_000;

export class Live {
  /**
   * `isNews(item)`; `onItems(items)`; `onState("connecting" | "live" | "waiting")`; `onTooMany()`: read the home from its
   * top again.
   */
  constructor({ since, isNews, onItems, onState, onTooMany }) {
    this.newest = since || "1"; // 0 would leave out what came before the stream began
    Object.assign(this, { isNews, onItems, onState, onTooMany });
    this.stopped = new AbortController();
    this.attempt = new AbortController();
    const { signal } = this.stopped;
    addEventListener("online", () => this.wake?.(), { signal });
    addEventListener("offline", () => this.attempt.abort(), { signal });
    document.addEventListener("visibilitychange", () => this.visibility(), { signal });
    this.run();
  }

  stop() {
    this.stopped.abort();
    this.attempt.abort();
    clearTimeout(this.hiding);
    this.wake?.();
  }

  /** Who doesn't look needs no stream, and a person may have five. */
  visibility() {
    clearTimeout(this.hiding);
    if (document.hidden) this.hiding = setTimeout(() => this.attempt.abort(), HIDDEN_MS_MAX);
    else this.wake?.();
  }

  async run() {
    for (let failures = 0; !this.stopped.signal.aborted;) {
      this.attempt = new AbortController();
      const begun = Date.now();
      try {
        this.onState("connecting");
        if ((await this.stream()) === "gap") await this.catchUp();
        failures = 0;
      } catch (error) {
        if ([401, 403].includes(error.status)) return;
        failures = Date.now() - begun > WAIT_MS_MAX ? 1 : failures + 1;
      }
      if (this.stopped.signal.aborted) return;
      const idle = document.hidden || !navigator.onLine;
      if (failures || idle) this.onState("waiting");
      const wait = Math.min(WAIT_MS * 2 ** Math.min(failures, 10), WAIT_MS_MAX) * (0.5 + Math.random() / 2);
      await new Promise((resolve) => {
        this.wake = resolve;
        if (!idle) setTimeout(resolve, wait);
      });
    }
  }

  /** Reads one stream to its end: "end", or "gap". Raises what ends it otherwise. */
  async stream() {
    const silent = () => setTimeout(() => this.attempt.abort(), SILENT_MS_MAX);
    let watch = silent();
    try {
      const response = await send("GET", "/timeline/home/stream", {
        query: { newerThanId: this.newest },
        headers: { accept: "text/event-stream" },
        signal: this.attempt.signal,
      });
      this.onState("live");
      for await (const { event, data } of eventsOf(response.body)) {
        clearTimeout(watch);
        watch = silent();
        if (event === "gap") return "gap";
        if (event === "error") throw new Error("the server behind the stream ended");
        if (event === "item") this.take([JSON.parse(data)]);
      }
      return "end";
    } finally {
      clearTimeout(watch);
      this.attempt.abort();
    }
  }

  async catchUp() {
    const query = { newerThanId: this.newest, limit: CATCH_UP_LIMIT };
    const came = [];
    for (let page = 0; page < CATCH_UP_PAGES && came.length <= CATCH_UP_MAX; page++) {
      const reply = await call("GET", "/timeline/home", { query, signal: this.stopped.signal });
      came.push(...(reply.items ?? []).filter(this.isNews));
      query.cursor = reply.nextCursor;
      if (!query.cursor) return this.take(came);
    }
    this.newest = newest(this.newest, ...came.map((item) => item.itemId)); // the home's own pages bring them
    this.onTooMany();
  }

  take(items) {
    this.onItems(items);
    this.newest = newest(this.newest, ...items.map((item) => item.itemId));
  }
}

/** The events of a stream: `{event, data}`. Lines end with \n, \r\n or \r. */
export async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest = (rest + value).replaceAll("\r\n", "\n");
    if (rest.length > EVENT_CHARS_MAX) throw new Error("an event without an end");
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    yield* blocks.map(parse).filter(({ data }) => data !== null);
  }
}

function parse(block) {
  const found = { event: "message", data: null };
  for (const line of block.split("\n")) {
    const [, name, value] = /^(\w+): ?(.*)$/.exec(line) ?? [];
    if (name === "event") found.event = value;
    else if (name === "data") found.data = found.data === null ? value : `${found.data}\n${value}`;
  }
  return found;
}
