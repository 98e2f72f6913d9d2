// A list of cards that keeps itself: pages as one scrolls, what comes on top, edits, deletions and counts.

import { call, compareIds, engagements, events, Problem, session } from "./api.js";
import { forget, send } from "./compose.js";
import { freshen, h, skeletons, state } from "./dom.js";
import { Feed } from "./feed.js";
import { card, draw } from "./tweet.js";

const REFRESH_MS = 15_000;
const REFRESH_MAX = 100;
const AHEAD = "1200px";
const EMPTY_PAGES_MAX = 20;

export class CardList {
  /**
   * `read(cursor)` → {items, nextCursor}; `empty()` → what to show when there's nothing. `takes(item)`: whether one's new
   * tweet belongs here; `sends`: whether it is shown while it is sent. `begun(items)` is called with each first page.
   * `hide(userId)`: whom one doesn't want to see any more. `main`: cards are what the page is about. `all`: the last word.
   */
  constructor({
    read,
    empty,
    takes = () => false,
    sends = false,
    begun = () => {},
    hide = () => {},
    main = false,
    all = "That is all.",
  }) {
    Object.assign(this, { read, empty, takes, sends, begun, hide, main, all });
    this.feed = new Feed();
    this.views = new Map();
    this.sending = new Map();
    this.waiting = h("div.sending");
    this.list = h("div.cards", { role: "feed", ariaBusy: "true", ariaLabel: "Tweets", hidden: true });
    this.end = h("div.end");
    this.element = h("div", {}, this.waiting, this.list, this.end);
    this.watcher = new IntersectionObserver(([entry]) => entry.isIntersecting && this.more(), { rootMargin: AHEAD });
    this.stopped = new AbortController();
    this.listen();
    this.restart();
  }

  stop() {
    this.stopped.abort();
    this.watcher.disconnect();
    clearInterval(this.refreshing);
  }

  /** From the first page on. What is shown stays until the new page is there. */
  async restart() {
    this.generation = {};
    this.cursor = "";
    this.done = false;
    this.loading = null;
    if (!this.feed.items.length) this.end.replaceChildren(skeletons());
    await this.more(true);
  }

  /** The next page, and pages after it while they are empty. One at a time. */
  more(fresh = false) {
    if (this.loading) return this.loading;
    const loading = this.page(fresh, this.generation).finally(() => {
      if (this.loading === loading) this.loading = null;
    });
    return (this.loading = loading);
  }

  async page(fresh, generation) {
    if (this.done) return;
    this.watcher.disconnect();
    this.again = null;
    this.list.ariaBusy = "true";
    try {
      if (!fresh) this.end.replaceChildren(skeletons(2));
      let found = 0;
      for (let pages = 0; pages < EMPTY_PAGES_MAX && !found; pages++) {
        const reply = await this.read(this.cursor);
        if (generation !== this.generation || this.stopped.signal.aborted) return;
        if (fresh) this.clear();
        fresh &&= (this.begun(reply.items ?? []), false);
        found = this.add(reply.items ?? []).length;
        this.cursor = reply.nextCursor ?? "";
        this.done = !this.cursor;
        if (this.done) break;
      }
      this.foot();
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      if (generation === this.generation) this.failed(error);
    } finally {
      this.list.ariaBusy = "false";
    }
  }

  foot() {
    this.list.hidden = !this.feed.items.length; // a feed without articles is none
    if (!this.done) {
      this.end.replaceChildren(h("button.quiet", { type: "button", onclick: () => this.more() }, "More"));
      this.watcher.observe(this.end);
    } else if (this.feed.items.length) {
      this.end.replaceChildren(h("p.all", {}, this.all));
    } else {
      this.end.replaceChildren(this.empty());
    }
  }

  failed(error) {
    const title = error.status ? "That didn't work" : "No connection";
    this.again = () => (this.feed.items.length ? this.more() : this.restart());
    this.end.replaceChildren(state(title, error.message, this.again));
  }

  clear() {
    this.feed = new Feed();
    this.views.clear();
    this.list.replaceChildren();
  }

  /** Whether an item is here, or a page further down will bring it. */
  expects(id) {
    const last = this.feed.items.at(-1);
    return this.feed.byId.has(id) || Boolean(!this.done && last && compareIds(id, last.itemId) < 0);
  }

  /** Takes items in, each at its place; returns those that are new. */
  add(items) {
    const added = this.feed.add(items);
    this.list.hidden = !this.feed.items.length;
    for (const { item, before } of added) {
      const view = card(item, { main: this.main });
      this.views.set(item.itemId, view);
      this.list.insertBefore(view.element, before ? this.views.get(before.itemId).element : null);
    }
    if (added.length) this.engaged(added.map(({ item }) => item.tweet.tweetId));
    return added;
  }

  remove(test) {
    for (const item of this.feed.remove(test)) {
      this.views.get(item.itemId).element.remove();
      this.views.delete(item.itemId);
    }
    if (this.done) this.foot();
  }

  /** Which of these I like and have retweeted. */
  async engaged(ids) {
    const [wanted, asked] = [[...new Set(ids)], performance.now()];
    for (let start = 0; start < wanted.length; start += REFRESH_MAX) {
      const some = wanted.slice(start, start + REFRESH_MAX);
      const { liked, retweeted } = await engagements(some).catch(() => ({}));
      if (liked) this.engage(new Set(some), liked, retweeted, asked);
    }
  }

  engage(ids, liked, retweeted, asked) {
    for (const view of this.views.values()) {
      const id = view.item.tweet.tweetId;
      if (view.changedAt > asked) continue; // the answer may be older than what was done here
      if (!ids.has(id) || (view.liked === liked.has(id) && view.retweeted === retweeted.has(id))) continue;
      view.liked = liked.has(id);
      view.retweeted = retweeted.has(id);
      draw(view);
    }
  }

  listen() {
    const { signal } = this.stopped;
    const on = (type, handle) => events.addEventListener(type, ({ detail }) => handle(detail), { signal });
    on("deleted", (id) => this.remove((item) => item.tweet.tweetId === id || item.itemId === id));
    on("edited", (tweet) => this.replace(tweet));
    on("relation", ({ kind, userId, on: begun }) => {
      if (begun ? kind !== "follows" : kind === "follows") this.hide(userId);
    });
    if (this.sends) on("sending", (sending) => this.showSending(sending));
    on("sent", ({ sending, item }) => {
      this.sending.get(sending.key)?.remove();
      this.sending.delete(sending.key);
      if (!this.takes(item)) return;
      this.add([item]);
      if (this.done) this.foot();
    });
    on("unsent", ({ sending, later, message }) => this.showUnsent(sending, later, message));
    this.refreshing = setInterval(() => document.hidden || this.refresh(), REFRESH_MS);
    const again = () => {
      for (const { retry } of [...this.sending.values()].map((element) => element.view)) retry?.();
      this.again?.();
    };
    addEventListener("online", again, { signal });
  }

  replace(tweet) {
    for (const view of this.views.values()) {
      if (view.item.tweet.tweetId !== tweet.tweetId) continue;
      view.item.tweet = { ...tweet, counts: tweet.counts ?? view.item.tweet.counts };
      draw(view);
    }
  }

  /** What is in sight, as it is now: counts, edits, and what is gone. */
  async refresh() {
    const seen = [...this.views.values()].filter(({ element }) => {
      const { top, bottom } = element.getBoundingClientRect();
      return bottom > 0 && top < innerHeight;
    });
    seen.forEach(({ element }) => freshen(element));
    const ids = [...new Set(seen.map((view) => view.item.tweet.tweetId))].slice(0, REFRESH_MAX);
    if (!ids.length) return;
    const reply = await call("GET", "/tweets", { query: { tweetIds: ids } }).catch(() => null);
    if (!reply || this.stopped.signal.aborted) return;
    const now = new Map((reply.tweets ?? []).map((tweet) => [tweet.tweetId, tweet]));
    this.remove((item) => ids.includes(item.tweet.tweetId) && !now.has(item.tweet.tweetId));
    for (const view of seen) {
      const [before, after] = [view.item.tweet, now.get(view.item.tweet.tweetId)];
      const same =
        after && after.version === before.version && JSON.stringify(after.counts) === JSON.stringify(before.counts);
      if (after && !same) this.replace(after);
    }
  }

  // One's own tweet on its way.

  showSending(sending) {
    const tweet = { text: sending.text, createdAt: new Date().toISOString() };
    const view = card({ itemId: "", tweet, author: session.me }, { sending: true });
    view.element.classList.add("on-its-way");
    view.element.ariaLabel = "Your tweet, on its way";
    view.element.querySelector(".actions").replaceChildren(h("span.note", { role: "status" }, "Sending…"));
    this.sending.set(sending.key, view.element);
    this.waiting.prepend(view.element);
  }

  showUnsent(sending, later, message) {
    const element = this.sending.get(sending.key);
    if (!element) return;
    const gone = () => {
      element.remove();
      this.sending.delete(sending.key);
      forget(sending);
    };
    if (!later) return gone();
    const note = element.querySelector(".actions");
    element.view.retry = () => {
      element.view.retry = null;
      note.replaceChildren(h("span.note", { role: "status" }, "Sending…"));
      send(sending).catch((error) => this.showUnsent(sending, true, error.message));
    };
    note.replaceChildren(
      h("span.note.error", { role: "alert" }, `Not sent: ${message}`),
      h("button.quiet", { type: "button", onclick: () => element.view.retry?.() }, "Send again"),
      h("button.quiet", { type: "button", onclick: gone }, "Discard"),
    );
  }
}
