// A tweet as a card, and what can be done with it.

import { call, isId, people, relate, related, say, session } from "./api.js";
import { compose, composer } from "./compose.js";
import { avatar, confirmed, count, dialog, h, icon, menu, moment, toast } from "./dom.js";
import { pieces } from "./text.js";

/**
 * The card of an item `{itemId, tweet, author, retweetedBy, references}`. `shown` is what the card knows: `liked`,
 * `retweeted`. `show(item, shown)` draws it again; the element stays the same one.
 */
export function card(item, { main = false, sending = false } = {}) {
  const element = h("article.tweet", { tabIndex: 0, "data-id": item.itemId, "data-tweet": item.tweet.tweetId });
  const view = { element, item, liked: false, retweeted: false, changedAt: 0, main };
  element.classList.toggle("main", main);
  const opens = !main && !sending;
  element.addEventListener("click", (event) => {
    if (!event.target.closest("a, button, img") && getSelection().isCollapsed && opens) open(view);
  });
  element.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target === element && opens) open(view);
  });
  element.view = view;
  draw(view);
  return view;
}

function open({ item }) {
  location.hash = `#/tweet/${item.tweet.tweetId}`;
}

/** Draws a card from what its view knows now. */
export function draw(view) {
  const { item, element } = view;
  const { tweet, author, retweetedBy } = item;
  const hadFocus = element.contains(document.activeElement) && document.activeElement.dataset.action;
  element.setAttribute("aria-label", `${author.displayName || author.handle}: ${tweet.text}`);
  element.classList.toggle("gone", Boolean(view.gone));
  element.replaceChildren(
    retweetedBy && isId(retweetedBy.userId) ? h("p.context", {}, icon("retweet"), link(retweetedBy), " retweeted") : "",
    h(
      "div.tweet-row",
      {},
      h("a", { href: `#/@${author.handle}`, tabIndex: -1, ariaHidden: "true" }, avatar(author)),
      h(
        "div.grow",
        {},
        head(view),
        answered(item),
        body(tweet.text),
        media(tweet),
        quote(item),
        view.main && fullDate(tweet),
        foot(view),
      ),
    ),
  );
  if (hadFocus) element.querySelector(`[data-action="${hadFocus}"]`)?.focus();
}

function link(user) {
  return h("a.name", { href: `#/@${user.handle}` }, user.displayName || `@${user.handle}`);
}

function head({ item: { tweet, author } }) {
  return h(
    "header.tweet-head",
    {},
    link(author),
    h("span.handle", {}, `@${author.handle}`),
    tweet.tweetId && h("span.dot", { ariaHidden: "true" }, "·"),
    tweet.tweetId && h("a.when", { href: `#/tweet/${tweet.tweetId}` }, moment(tweet.createdAt)),
    tweet.editedAt
      ? h("button.edited", { type: "button", "data-action": "history", onclick: () => history(tweet) }, "edited")
      : "",
  );
}

function fullDate({ createdAt }) {
  return h("p.full-date", {}, new Date(createdAt).toLocaleString("en", { dateStyle: "long", timeStyle: "short" }));
}

/** Text with its links; nothing of it is markup. */
export function body(text) {
  return h("p.text", {}, ...pieces(text).map(piece));
}

function piece(part) {
  if (typeof part === "string") return part;
  if (part.mention) return h("a", { href: `#/@${part.mention}` }, `@${part.mention}`);
  const href = /^https?:\/\//i.test(part.link) ? part.link : `https://${part.link}`;
  return h(
    "a",
    { href, target: "_blank", rel: "noopener noreferrer nofollow" },
    part.link.replace(/^https?:\/\//i, ""),
  );
}

function reference(item, id) {
  return (item.references ?? []).find((found) => found.tweetId === id);
}

function answered(item) {
  const { inReplyToTweetId: id } = item.tweet;
  if (!isId(id)) return "";
  const author = reference(item, id)?.author;
  const whom = author ? h("a", { href: `#/@${author.handle}` }, `@${author.handle}`) : "a tweet";
  return h("p.answered", {}, "Replying to ", whom);
}

function quote(item) {
  const { quotedTweetId: id } = item.tweet;
  if (!isId(id)) return "";
  const quoted = reference(item, id);
  if (!quoted?.tweet) return h("p.quoted.unavailable", {}, "This tweet is unavailable.");
  return h(
    "a.quoted",
    { href: `#/tweet/${id}` },
    quoted.author ? h("strong", {}, `@${quoted.author.handle} `) : "",
    quoted.tweet.text,
  );
}

function media(tweet) {
  const urls = (tweet.mediaUrls ?? []).filter((url) => /^https?:\/\//.test(url));
  if (!urls.length) return "";
  return h(
    "div.media",
    {},
    urls.map((src, index) => h("img", { src, alt: `Picture ${index + 1} of this tweet`, loading: "lazy" })),
  );
}

function foot(view) {
  const counts = view.item.tweet.counts ?? {};
  const { liked, retweeted } = view;
  const again = retweeted ? "Undo the retweet" : "Retweet or quote";
  return h(
    "div.actions",
    { role: "group", ariaLabel: "Actions" },
    action("reply", "Reply", counts.replies, false, () => compose({ inReplyTo: view.item })),
    action("retweet", again, counts.retweets, retweeted, () => retweetOrQuote(view)),
    action("like", liked ? "Unlike" : "Like", counts.likes, liked, () => like(view)),
    action("more", "More", 0, null, () => more(view)),
  );
}

function action(name, label, number, pressed, run) {
  const many = Number(number ?? 0);
  return h(
    `button.action.${name}`,
    {
      type: "button",
      title: label,
      ariaLabel: many ? `${label}, ${many}` : label,
      "aria-pressed": name === "like" || name === "retweet" ? String(pressed) : null,
      "data-action": name,
      onclick: guarded(run),
    },
    icon(name),
    h("span", {}, many ? count(many) : ""),
  );
}

/** What goes wrong is told, and never lost. */
export function guarded(run) {
  return async () => {
    try {
      await run();
    } catch (error) {
      toast(error.message);
    }
  };
}

/** Changes what is seen at once, and back if the server refuses. */
async function change(view, apply, request) {
  view.changedAt = Infinity;
  apply(true);
  draw(view);
  try {
    await request();
  } catch (error) {
    apply(false);
    draw(view);
    throw error;
  } finally {
    view.changedAt = performance.now();
  }
}

function bump(view, name, by) {
  const counts = { ...view.item.tweet.counts };
  counts[name] = String(Math.max(0, Number(counts[name] ?? 0) + by));
  view.item.tweet = { ...view.item.tweet, counts };
}

export function like(view) {
  const on = !view.liked;
  const apply = (done) => {
    view.liked = done === on;
    bump(view, "likes", done === on ? 1 : -1);
  };
  const path = `/tweets/${view.item.tweet.tweetId}/likes`;
  return change(view, apply, () => call(on ? "POST" : "DELETE", path));
}

export async function retweetOrQuote(view) {
  if (view.retweeted) return retweet(view);
  return menu("Share it", [
    { label: "Retweet", icon: "retweet", run: () => retweet(view) },
    { label: "Quote", icon: "quote", run: () => compose({ quoted: view.item }) },
  ]);
}

function retweet(view) {
  const on = !view.retweeted;
  const apply = (done) => {
    view.retweeted = done === on;
    bump(view, "retweets", done === on ? 1 : -1);
  };
  const path = `/tweets/${view.item.tweet.tweetId}/retweets`;
  return change(view, apply, () => call(on ? "POST" : "DELETE", path));
}

export async function more(view) {
  const { tweet, author } = view.item;
  const past = { label: "See how it was edited", icon: "history", run: () => history(tweet) };
  if (author.userId === session.me.userId) {
    return menu("Your tweet", [
      { label: "Edit", icon: "edit", run: () => edit(view) },
      ...(tweet.editedAt ? [past] : []),
      { label: "Delete", icon: "delete", danger: true, run: () => remove(view) },
    ]);
  }
  const [follows, mutes, blocks] = await Promise.all(["follows", "mutes", "blocks"].map(related));
  const id = author.userId;
  const name = `@${author.handle}`;
  return menu(`Tweet of ${name}`, [
    ...(tweet.editedAt ? [past] : []),
    ...(blocks.has(id) ? [] : [toggle("follows", author, follows.has(id), "person", "Follow", "Unfollow")]),
    toggle("mutes", author, mutes.has(id), "close", "Mute", "Unmute"),
    blocks.has(id)
      ? toggle("blocks", author, true, "shield", "Block", "Unblock")
      : { label: `Block ${name}`, icon: "shield", danger: true, run: () => block(author) },
  ]);
}

function toggle(kind, author, on, image, begin, end) {
  const label = `${on ? end : begin} @${author.handle}`;
  return { label, icon: image, run: guarded(() => relate(kind, author.userId, !on)) };
}

export async function block(author) {
  const text = `Neither of you sees the other's tweets any more, and follows between you end.`;
  if (await confirmed(`Block @${author.handle}?`, text, "Block")) {
    await relate("blocks", author.userId, true);
    toast(`@${author.handle} is blocked.`);
  }
}

function edit(view) {
  const { tweet } = view.item;
  return dialog("Edit", (close) =>
    composer({
      key: null,
      label: "Edit the tweet",
      placeholder: "",
      button: "Save",
      text: tweet.text,
      submit: async (text) => {
        const changed = await call("PATCH", `/tweets/${tweet.tweetId}`, { body: { text } });
        say("edited", changed);
        close(true);
        toast("Your tweet was changed.");
      },
    }),
  );
}

async function remove(view) {
  const { tweet } = view.item;
  if (!(await confirmed("Delete this tweet?", "It is gone for everybody, with what it was before.", "Delete"))) return;
  await call("DELETE", `/tweets/${tweet.tweetId}`);
  say("deleted", tweet.tweetId);
  toast("Your tweet was deleted.");
}

/** What a tweet was, newest first. */
export async function history(tweet) {
  const query = { limit: 100 };
  const reply = await call("GET", `/tweets/${tweet.tweetId}/revisions`, { query }).catch((error) => {
    toast(error.message);
    return null;
  });
  if (!reply) return;
  const { revisions } = reply;
  await dialog("How it was edited", () =>
    h(
      "ol.revisions",
      {},
      revisions.map((revision, index) =>
        h("li", {}, h("p.when", {}, index ? "" : "Now, since ", moment(revision.createdAt)), body(revision.text)),
      ),
    ),
  );
}

/** Tweets with their references as items: authors are looked up. */
export async function itemsOf(tweets, references = []) {
  const known = new Map((references ?? []).map((one) => [one.tweetId, one.tweet]));
  const all = [...tweets, ...[...known.values()].filter(Boolean)];
  const users = await people(all.map((tweet) => tweet.authorId));
  const of = (tweet) => users.get(tweet.authorId) ?? { userId: tweet.authorId, handle: "unknown", displayName: "" };
  const refer = (tweet) =>
    [tweet.inReplyToTweetId, tweet.quotedTweetId].filter(isId).map((tweetId) => {
      const found = known.get(tweetId);
      return { tweetId, tweet: found, author: found && of(found) };
    });
  return tweets.flatMap((tweet) => {
    if (!isId(tweet.retweetedTweetId))
      return [{ itemId: tweet.tweetId, tweet, author: of(tweet), references: refer(tweet) }];
    const original = known.get(tweet.retweetedTweetId);
    if (!original) return [];
    const references = refer(original);
    return [{ itemId: tweet.tweetId, tweet: original, author: of(original), retweetedBy: of(tweet), references }];
  });
}
