// The REST API, the session, and what is known of people. Every request here may be repeated: reads, changes that say
// "again: changes nothing", and posts with their key. So what fails on the way is tried again, a few times.

const TOKEN = "starling.token";
const WRITTEN = "starling.written";
const ATTEMPTS = 3;
const TIMEOUT_MS = 15_000;
const WAIT_MS_MAX = 5_000;
const USERS_MAX = 2_000;
const BATCH = 100;
const RELATION_PAGE = 1_000;
const RELATION_PAGES = 10;

/** "signedout" with a message; "relation" when a follow, block or mute has changed. */
export const events = new EventTarget();

export function say(type, detail) {
  events.dispatchEvent(new CustomEvent(type, { detail }));
}

/** What the server refused. `status` 0: it wasn't reached. */
export class Problem extends Error {
  constructor(status, body = {}) {
    super(body.detail || body.title || "The server can't be reached.");
    this.status = status;
    this.reason = body.reason ?? "";
    this.fields = body.fields ?? [];
  }

  /** Whether the same request may succeed later. */
  get passing() {
    return [0, 429, 502, 503, 504].includes(this.status);
  }
}

export const session = {
  me: null,

  get token() {
    return sessionStorage.getItem(TOKEN);
  },

  async signIn(token) {
    sessionStorage.setItem(TOKEN, token);
    try {
      session.me = await call("GET", "/me");
    } catch (error) {
      if (error.status !== 0) session.forget();
      throw error;
    }
    remember(session.me);
  },

  forget() {
    sessionStorage.removeItem(TOKEN);
    sessionStorage.removeItem(WRITTEN);
    session.me = null;
    users.clear();
    relations.clear();
  },

  signOut(message = "") {
    session.forget();
    say("signedout", message);
  },
};

/** A request; resolves with the JSON, raises Problem. */
export async function call(method, path, { query = {}, body, headers = {}, signal } = {}) {
  for (let attempt = 1; ; attempt++) {
    try {
      const response = await send(method, path, { query, body, headers, signal, timeout: TIMEOUT_MS });
      if (path === "/tweets" && method === "POST") keepWritten(response);
      return response.status === 204 ? {} : await response.json();
    } catch (error) {
      const passing = error instanceof Problem && error.passing;
      if (!passing || attempt === ATTEMPTS || !navigator.onLine || signal?.aborted) throw error;
      await new Promise((resolve) => setTimeout(resolve, error.waitMs ?? 300 * 2 ** attempt * (0.5 + Math.random())));
    }
  }
}

/** One attempt; resolves with the response if it's a good one, raises Problem. `timeout` 0: none. */
export async function send(method, path, { query = {}, body, headers = {}, signal, timeout = 0 }) {
  const signals = [signal, timeout && AbortSignal.timeout(timeout)].filter(Boolean);
  const token = session.token;
  let response;
  try {
    response = await fetch(`/api/v1${path}${search(query)}`, {
      method,
      headers: {
        authorization: `Bearer ${token}`,
        ...(body === undefined ? {} : { "content-type": "application/json" }),
        ...headers,
      },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: signals.length ? AbortSignal.any(signals) : undefined,
      cache: "no-store",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Problem(0);
  }
  if (response.ok) return response;
  const problem = new Problem(response.status, await response.json().catch(() => ({ title: response.statusText })));
  const seconds = Number(response.headers.get("retry-after"));
  if (seconds > 0) problem.waitMs = Math.min(seconds * 1_000, WAIT_MS_MAX);
  if (response.status === 401 && token === session.token && session.me) {
    session.signOut("Your session is over. Sign in again; what you wrote is kept.");
  }
  throw problem;
}

function search(query) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of [value].flat()) if (one !== undefined && one !== "" && one !== null) parameters.append(name, one);
  }
  return parameters.size ? `?${parameters}` : "";
}

function keepWritten(response) {
  const written = response.headers.get("starling-read-your-write");
  if (written) sessionStorage.setItem(WRITTEN, written);
}

/** The token with which the next home is sure to show what was written here. */
export function written() {
  return sessionStorage.getItem(WRITTEN) ?? "";
}

/** A UUID; crypto.randomUUID wants a secure context. */
export function uuid() {
  if (crypto.randomUUID) return crypto.randomUUID();
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}

/** Whether an id says something; 0 and a missing one don't. */
export function isId(id) {
  return Boolean(id) && id !== "0";
}

/** Orders ids, which no double holds: below 0 when `a` is the smaller. */
export function compareIds(a, b) {
  return a.length - b.length || (a < b ? -1 : a > b ? 1 : 0);
}

export function newest(...ids) {
  return ids.reduce((a, b) => (compareIds(a, b) < 0 ? b : a), "0");
}

// People

const users = new Map();

export function remember(user) {
  users.delete(user.userId);
  users.set(user.userId, user);
  if (users.size > USERS_MAX) users.delete(users.keys().next().value);
}

/** Users by id, those that exist; what isn't known is asked for. */
export async function people(ids) {
  const unknown = [...new Set(ids)].filter((id) => isId(id) && !users.has(id));
  for (let start = 0; start < unknown.length; start += BATCH) {
    const found = await call("GET", "/users", { query: { userIds: unknown.slice(start, start + BATCH) } });
    (found.users ?? []).forEach(remember);
  }
  return new Map(ids.filter((id) => users.has(id)).map((id) => [id, users.get(id)]));
}

/** Which of some tweets (at most 100) I like, and have retweeted: two sets. */
export async function engagements(ids) {
  if (!ids.length) return { liked: new Set(), retweeted: new Set() };
  const reply = await call("GET", "/engagements", { query: { tweetIds: ids } });
  return { liked: new Set(reply.likedTweetIds), retweeted: new Set(reply.retweetedTweetIds) };
}

// Whom I follow, block and mute: sets of ids, read once, then kept up with what is done here.

const relations = new Map();
const WHERE = {
  follows: () => `/users/${session.me.userId}/following`,
  blocks: () => "/blocks",
  mutes: () => "/mutes",
};

export async function related(kind) {
  if (!relations.has(kind)) {
    const found = new Set();
    let cursor = "";
    for (let page = 0; page < RELATION_PAGES; page++) {
      const reply = await call("GET", WHERE[kind](), { query: { limit: RELATION_PAGE, cursor } });
      reply.userIds?.forEach((id) => found.add(id));
      cursor = reply.nextCursor;
      if (!cursor) break;
    }
    relations.set(kind, found);
  }
  return relations.get(kind);
}

/** Follow, block or mute somebody, or end it. */
export async function relate(kind, userId, on) {
  if (on) await call("POST", `/${kind}`, { body: { targetId: userId } });
  else await call("DELETE", `/${kind}/${userId}`);
  relations.get(kind)?.[on ? "add" : "delete"](userId);
  if (kind === "blocks" && on) relations.get("follows")?.delete(userId);
  if (kind !== "mutes") users.delete(userId);
  say("relation", { kind, userId, on });
}
