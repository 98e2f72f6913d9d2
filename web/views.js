// What fills the page. A view is {element, title, stop}, and the home is one that stays while others are looked at.

import { call, compareIds, events, isId, newest, people, relate, related, session, written } from "./api.js";
import { composer, post, showUnsent } from "./compose.js";
import { announce, avatar, count, dialog, h, icon, logo, menu, plural, skeletons, state } from "./dom.js";
import { CardList } from "./list.js";
import { Live } from "./live.js";
import { block, guarded, itemsOf } from "./tweet.js";

const PAGE = 20;
const PEOPLE_PAGE = 50;
const PENDING_MAX = 500;

export function heading(text, back = true) {
  const title = h("h1", { tabIndex: -1 }, text);
  const button = h("button.round", { type: "button", ariaLabel: "Back", onclick: () => history.back() }, icon("back"));
  return h("header.bar", {}, back ? button : "", title);
}

// Sign in

export function signIn(message, done) {
  const error = h("p.error", { role: "alert" }, message);
  const token = h("input", {
    id: "token",
    type: "password",
    autocomplete: "off",
    spellcheck: false,
    required: true,
    "aria-describedby": "how",
  });
  const button = h("button.primary.wide", { type: "submit" }, "Sign in");
  const form = h("form", {}, h("label", { htmlFor: "token" }, "Development token"), token, error, button);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    error.textContent = "";
    try {
      await session.signIn(token.value.trim());
      done();
    } catch (problem) {
      error.textContent = reasonOf(problem);
    }
    button.disabled = false;
  });
  return h(
    "main.sign-in",
    { id: "main" },
    h(
      "div.panel",
      {},
      logo(),
      h("h1", {}, "Sign in"),
      h("p", {}, "Everybody you follow, newest first, nothing left out."),
      form,
      h("p.how", { id: "how" }, "Where the mesh runs, this prints a token:"),
      h("pre", { tabIndex: 0, ariaLabel: "Commands" }, "starling user create alice\nstarling token alice"),
      h("p.how", {}, h("a", { href: "/ops" }, "For operators"), " · ", h("a", { href: "/docs" }, "The API")),
    ),
  );
}

function reasonOf(problem) {
  if (problem.status === 401) return "This token isn't valid, or it has expired. Make a new one.";
  if (problem.status === 403) return "This token isn't a person's: operators have a page of their own.";
  if (problem.status === 404) return "Nobody here has this token's id: is it of another mesh?";
  return problem.message;
}

/** Goes to somebody's page by handle. */
export function find() {
  return dialog("Find somebody", (close) => {
    const name = h("input", {
      id: "handle",
      autocomplete: "off",
      autocapitalize: "none",
      spellcheck: false,
      required: true,
      pattern: "\\s*@?[A-Za-z0-9_]{1,15}\\s*",
      title: "Up to 15 letters, digits and _",
    });
    const form = h(
      "form.find",
      {},
      h("label", { htmlFor: "handle" }, "Handle"),
      h("div.buttons", {}, name, h("button.primary", { type: "submit" }, "Go")),
    );
    name.setAttribute("autofocus", "");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      location.hash = `#/@${name.value.trim().replace(/^@/, "")}`;
      close();
    });
    return form;
  });
}

// Home

export class Home {
  constructor() {
    this.title = "Home";
    this.pending = [];
    this.tooMany = false;
    this.stale = false;
    this.status = h("span.live", { role: "status" });
    this.pill = h("button.pill", { type: "button", hidden: true, onclick: () => this.showNew() });
    this.list = new CardList({
      read: (cursor) => this.read(cursor),
      empty: () => state("Nothing here yet", "Post something, or find somebody to follow.", find, "Find somebody"),
      takes: ({ tweet }) => tweet.authorId === session.me.userId,
      sends: true,
      begun: (items) => this.begun(items),
      hide: (userId) => this.hide(userId),
    });
    const bar = heading("Home", false);
    bar.append(this.status);
    this.element = h(
      "div.home",
      {},
      bar,
      composer({
        key: "new",
        label: "New tweet",
        placeholder: "What is going on?",
        button: "Tweet",
        submit: (text) => post({ text }),
      }),
      h("div.pill-place", {}, this.pill),
      this.list.element,
    );
    this.stopped = new AbortController();
    events.addEventListener("relation", ({ detail }) => this.related(detail), { signal: this.stopped.signal });
    showUnsent();
  }

  stop() {
    this.stopped.abort();
    this.live?.stop();
    this.list.stop();
  }

  shown() {
    if (this.stale) this.restart();
  }

  async read(cursor) {
    this.seen = new Set(this.pending);
    const query = { limit: PAGE, cursor, readYourWriteToken: cursor ? "" : written() };
    return call("GET", "/timeline/home", { query });
  }

  restart() {
    this.stale = this.tooMany = false;
    scrollTo(0, 0);
    return this.list.restart();
  }

  begun(items) {
    // What had come before the page was read is in it, or isn't to be seen any more.
    this.pending = this.pending.filter((item) => !this.seen.has(item));
    this.count();
    this.live ??= new Live({
      since: newest(...items.map((item) => item.itemId)).replace(/^0$/, ""),
      isNews: (item) => this.isNews(item),
      onItems: (came) => this.came(came),
      onState: (now) => this.say(now),
      onTooMany: () => this.overflow(),
    });
  }

  say(now) {
    const words = { live: "Live", connecting: "Connecting…", waiting: "Waiting for a connection…" };
    if (this.status.dataset.state === "live" && now === "connecting") return; // streams are short; that is no news
    this.status.dataset.state = now;
    this.status.textContent = words[now];
  }

  isNews({ itemId }) {
    return !this.list.expects(itemId) && !this.pending.some((item) => item.itemId === itemId);
  }

  came(items) {
    const mine = [];
    for (const item of items) {
      if (!this.isNews(item)) continue;
      if (item.tweet.authorId === session.me.userId && !isId(item.retweetedBy?.userId)) mine.push(item);
      else this.pending.push(item);
    }
    this.list.add(mine);
    if (this.pending.length > PENDING_MAX) this.overflow();
    this.count();
  }

  overflow() {
    this.tooMany = true;
    this.pending = [];
    this.count();
  }

  count() {
    this.pending = this.pending.filter(({ itemId }) => !this.list.feed.byId.has(itemId));
    const number = this.pending.length;
    const words = this.tooMany ? "Many new tweets" : plural(number, "new tweet");
    this.pill.hidden = !number && !this.tooMany;
    if (!this.pill.hidden && this.pill.textContent !== words) announce(words);
    this.pill.replaceChildren(icon("up"), words);
    this.news = this.tooMany ? "many" : number ? count(number) : "";
    events.dispatchEvent(new CustomEvent("news", { detail: this.news }));
  }

  async showNew() {
    if (this.pill.hidden) return;
    const [items, first] = [this.pending, this.list.list.firstElementChild];
    this.pending = [];
    if (this.tooMany) await this.restart();
    else this.insert(items);
    this.count();
    scrollTo(0, 0);
    const top = this.list.list.firstElementChild;
    if (top !== first) top?.focus({ preventScroll: true });
  }

  /** Of several retweets of one tweet the newest is shown. */
  insert(items) {
    const newer = new Map();
    for (const item of items.filter(({ retweetedBy }) => isId(retweetedBy?.userId))) {
      const id = item.tweet.tweetId;
      newer.set(id, newest(newer.get(id) ?? "0", item.itemId));
    }
    this.list.add(items);
    this.list.remove(
      ({ itemId, tweet: { tweetId } }) => itemId !== tweetId && compareIds(itemId, newer.get(tweetId) ?? "0") < 0,
    );
  }

  related({ kind, on }) {
    if ((kind === "follows") === on) this.stale = true;
    if (this.stale && this.element.isConnected && !scrollY) this.restart();
  }

  hide(userId) {
    const isOf = ({ author, retweetedBy }) => author.userId === userId || retweetedBy?.userId === userId;
    this.list.remove(isOf);
    this.pending = this.pending.filter((item) => !isOf(item));
    this.count();
  }
}

// Profile

export async function profile(handle) {
  const user = await call("GET", `/users/by-handle/${encodeURIComponent(handle)}`);
  const isMe = user.userId === session.me.userId;
  const blocked = !isMe && (await related("blocks")).has(user.userId);
  const head = h("section.profile", { ariaLabel: "Profile" });
  const tweets = h("div", {});
  const view = {
    element: h("div", {}, heading(user.displayName || `@${user.handle}`), head, tweets),
    title: `@${user.handle}`,
  };
  const list =
    !blocked &&
    new CardList({
      read: async (cursor) => {
        const reply = await call("GET", `/users/${user.userId}/tweets`, { query: { limit: PAGE, cursor } });
        return { items: await itemsOf(reply.tweets ?? [], reply.references), nextCursor: reply.nextCursor };
      },
      empty: () => state("No tweets yet", isMe ? "What you post will be here." : `@${user.handle} hasn't posted.`),
      takes: ({ tweet }) => tweet.authorId === user.userId,
    });
  tweets.append(list ? list.element : state(`You block @${user.handle}`, "Neither of you sees the other's tweets."));
  await profileHead(head, user, isMe);
  view.stop = () => list && list.stop();
  return view;
}

async function profileHead(head, user, isMe) {
  const buttons = isMe ? [] : await profileButtons(user);
  const number = (path, value, word) =>
    h("a", { href: `#/@${user.handle}/${path}` }, h("strong", {}, count(value ?? 0)), ` ${word}`);
  const followed = Number(user.followerCount ?? 0);
  head.replaceChildren(
    h("div.profile-top", {}, avatar(user), h("div.buttons", {}, buttons)),
    h("p.display-name", {}, user.displayName || user.handle),
    h("p.handle", {}, `@${user.handle}`),
    h(
      "p.numbers",
      {},
      number("following", user.followingCount, "following"),
      number("followers", followed, followed === 1 ? "follower" : "followers"),
    ),
  );
}

async function profileButtons(user) {
  const [follows, mutes, blocks] = await Promise.all(["follows", "mutes", "blocks"].map(related));
  const id = user.userId;
  if (blocks.has(id))
    return [h("button.danger", { type: "button", onclick: guarded(() => relate("blocks", id, false)) }, "Unblock")];
  const actions = [
    {
      label: mutes.has(id) ? "Unmute" : "Mute",
      icon: "close",
      run: guarded(() => relate("mutes", id, !mutes.has(id))),
    },
    { label: "Block", icon: "shield", danger: true, run: guarded(() => block(user)) },
  ];
  const dots = { type: "button", ariaLabel: "More", onclick: () => menu(`@${user.handle}`, actions) };
  return [
    mutes.has(id) ? h("span.note", {}, "Muted") : "",
    h("button.round.outlined", dots, icon("more")),
    followButton(user, follows),
  ];
}

function followButton(user, follows) {
  const button = h("button", { type: "button" });
  const look = () => {
    const on = follows.has(user.userId);
    button.className = on ? "quiet follow" : "primary follow";
    button.textContent = on ? "Following" : "Follow";
    button.ariaLabel = on ? `Unfollow @${user.handle}` : `Follow @${user.handle}`;
  };
  const change = guarded(async () => {
    button.disabled = true;
    await relate("follows", user.userId, !follows.has(user.userId)).finally(() => (button.disabled = false));
    look();
  });
  button.addEventListener("click", change);
  look();
  return button;
}

// Lists of people

export async function followers(handle) {
  const user = await call("GET", `/users/by-handle/${encodeURIComponent(handle)}`);
  return peopleView(`Followers of @${user.handle}`, `/users/${user.userId}/followers`, followButtons);
}

export async function following(handle) {
  const user = await call("GET", `/users/by-handle/${encodeURIComponent(handle)}`);
  return peopleView(`@${user.handle} follows`, `/users/${user.userId}/following`, followButtons);
}

async function followButtons() {
  const follows = await related("follows");
  return (user) => (user.userId === session.me.userId ? "" : followButton(user, follows));
}

export async function hidden() {
  const sections = [
    ["Blocked", "blocks", "Unblock", "You block nobody."],
    ["Muted", "mutes", "Unmute", "You mute nobody."],
  ].map(([title, kind, word, nobody]) => {
    const ended = (user, row) => guarded(() => relate(kind, user.userId, false).then(() => row().remove()));
    const button = (user) => {
      const made = h("button.quiet", { type: "button", ariaLabel: `${word} @${user.handle}` }, word);
      made.addEventListener(
        "click",
        ended(user, () => made.closest(".person")),
      );
      return made;
    };
    return h(
      "section",
      { ariaLabel: title },
      h("h2.section", {}, title),
      peopleList(`/${kind}`, async () => button, nobody),
    );
  });
  return { element: h("div", {}, heading("Blocked and muted"), sections), title: "Blocked and muted", stop() {} };
}

function peopleView(title, path, buttons) {
  return { element: h("div", {}, heading(title), peopleList(path, buttons, "Nobody yet.")), title, stop() {} };
}

/** Rows of people, page by page. */
function peopleList(path, buttons, nobody) {
  const rows = h("div.people", {});
  const foot = h("div.end", {}, skeletons(2));
  let cursor = "";
  const more = async () => {
    foot.replaceChildren(skeletons(2));
    try {
      const reply = await call("GET", path, { query: { limit: PEOPLE_PAGE, cursor } });
      const [users, button] = [await people(reply.userIds ?? []), await buttons()];
      rows.append(...[...users.values()].map((user) => person(user, button(user))));
      cursor = reply.nextCursor ?? "";
      const all = rows.childElementCount ? "" : h("p.all", {}, nobody);
      foot.replaceChildren(cursor ? h("button.quiet", { type: "button", onclick: more }, "More") : all);
    } catch (error) {
      foot.replaceChildren(state("That didn't work", error.message, more));
    }
  };
  more();
  return h("div", {}, rows, foot);
}

function person(user, button) {
  return h(
    "div.person",
    {},
    avatar(user),
    h(
      "div.grow",
      {},
      h("a.name", { href: `#/@${user.handle}` }, user.displayName || user.handle),
      h("p.handle", {}, `@${user.handle}`),
    ),
    button,
  );
}

// One tweet

export async function tweet(id) {
  const reply = await call("GET", `/tweets/${id}`);
  const [item] = await itemsOf([reply.tweet], reply.references);
  if (!item) throw new Error("The tweet that was retweeted was deleted.");
  const parentId = item.tweet.inReplyToTweetId;
  const parent = item.references.find(({ tweetId }) => tweetId === parentId);
  const gone = () => state("It is gone", "This tweet was deleted.");
  const fixed = (items, empty, more = {}) => new CardList({ read: async () => ({ items }), empty, all: "", ...more });
  const above = parent?.tweet && fixed([{ itemId: parentId, ...parent }], gone);
  const main = fixed([item], gone, { main: true });
  const answers = fixed([], () => "", { takes: (sent) => sent.tweet.inReplyToTweetId === item.tweet.tweetId });
  const missing = h("p.quoted.unavailable", {}, "It answers a tweet that is unavailable.");
  const element = h(
    "div.one",
    {},
    heading("Tweet"),
    isId(parentId) ? (above ? h("div.above", {}, above.element) : missing) : "",
    main.element,
    composer({
      key: `reply.${item.tweet.tweetId}`,
      label: `Reply to @${item.author.handle}`,
      placeholder: "Your reply",
      button: "Reply",
      submit: (text) => post({ text, inReplyTo: item }).then(() => announce("Your reply was sent.")),
    }),
    answers.element,
  );
  const lists = [above, main, answers].filter(Boolean);
  const title = `@${item.author.handle}: ${item.tweet.text.slice(0, 40)}`;
  return { element, title, stop: () => lists.forEach((list) => list.stop()) };
}
