// What a tweet weighs, and what in it is a link, by twitter-text's rules (v3). tweet_svc is the judge; this tells people
// before they send, and a test holds the two together.

import { TLDS } from "./tlds.js";

export const MAX = 280;
const URL_WEIGHT = 23;
const SCANNED_MAX = 25_000;
const TLD_SET = new Set(TLDS.split(" "));
const TLD_CHARS_MAX = Math.max(...TLDS.split(" ").map((name) => name.length));
const URL_CHARS_MAX = 4_096;
const SLUG_CHARS_MAX = 40;
const LABEL_CHARS_MAX = 63; // RFC 1035, in the label's ASCII form
const LATIN = "À-ÖØ-öø-ɏɓɔɖɗəɛɣɨɯɲʉʋʻ\u0300-\u036fḀ-ỿ";
const INVALID = "\ufffe\ufeff\uffff";
const SPACES = "\t-\r \u0085\u00a0\u1680\u180e\u2000-\u200a\u2028\u2029\u202f\u205f\u3000";
const DIRECTIONS = "\u202a-\u202e\u061c\u200e\u200f\u2066-\u2069";
const NOT_IN_HOST = `!'#%&()*+,\\\\/:;<=>?@\\[\\]^{|}~$${SPACES}${INVALID}${DIRECTIONS}`;
const NOT_BEFORE = `(?<![A-Za-z0-9@＠$#＃${INVALID}])`;
const HOST_RUN = new RegExp(`[^${NOT_IN_HOST}]+`, "g"); // labels and dots
const HOST_START = new RegExp(`${NOT_BEFORE}[^\\-_.${NOT_IN_HOST}]`, "g");
const PROTOCOL = new RegExp(`${NOT_BEFORE}https?://$`, "i");
const ASCII_LABELS = new RegExp(`(?<![-A-Za-z0-9${LATIN}])(?:[-A-Za-z0-9${LATIN}]+\\.)+`, "g");
const PUNYCODE = /xn--[-0-9a-z]+/iy;
const IN_PATH = `[A-Za-z0-9Ѐ-ӿ${LATIN}!*';:=+,.$/%#\\[\\]–_~@|&-]`;
const PARENS = `\\((?:${IN_PATH}+|${IN_PATH}*\\(${IN_PATH}+\\)${IN_PATH}*)\\)`;
const PATH_END = `[A-Za-z0-9Ѐ-ӿ${LATIN}+=_#/-]`;
const QUERY = "\\?[A-Za-z0-9!?*'@();:&=+$/%#\\[\\]_.,~|-]*[A-Za-z0-9_&=#/-]";
const TAIL = new RegExp(`(?::[0-9]+)?(/(?:(?:${IN_PATH}|${PARENS})*(?:${PATH_END}|${PARENS}))?)?(?:${QUERY})?`, "y");
const TCO = new RegExp(`https?://t\\.co/([a-z0-9]+)(?:${QUERY})?`, "iy");
const MENTION = new RegExp(
  `(?:^|[^A-Za-z0-9_!#$%&*@＠]|(?:^|[^A-Za-z0-9_+~.-])rt:?)[@＠]([A-Za-z0-9_]{1,20})(?![A-Za-z0-9_@＠${LATIN}]|://)`,
  "gi",
);

/** The links in a text: `[start, end]`, in order, apart. The steps are those of tweet_svc/text.py. */
export function links(text) {
  const found = [];
  let free = 0; // what comes before it is used up
  for (const run of text.matchAll(HOST_RUN)) {
    for (const [low, high, chain, tld] of labels(text, run.index, run.index + run[0].length)) {
      const start = hostStart(text, Math.max(low, free), high, chain, tld);
      if (start < 0) continue;
      const host = text.slice(start, chain || tld);
      const tail = at(TAIL, text, start + host.length);
      const end = start + host.length + tail[0].length;
      const protocol = PROTOCOL.exec(text.slice(Math.max(start - 9, 0), start));
      const begin = protocol
        ? start - protocol[0].length + (protocol[0].length - protocol[0].trimStart().length)
        : start;
      const isUsedUp = begin < free;
      free = end + 1;
      if (!host.split(".").every(fitsDns) || (host.startsWith("xn--") && !asciiHosts(host).length)) continue;
      if (protocol && !isUsedUp) found.push(...withProtocol(text, begin, start, end));
      else if (!["-", "_", ".", "/"].includes(text[start - 1])) found.push(...bare(host, start, end, Boolean(tail[1])));
    }
  }
  return found;
}

function at(pattern, text, index) {
  pattern.lastIndex = index;
  return pattern.exec(text);
}

/** Each label of a run: start, end, where the longest host ends that the next label begins, and its top-level domain. */
function labels(text, start, end) {
  const found = [];
  let [chain, tld, high] = [0, 0, end];
  for (let low = end; low >= start; low--) {
    if (low > start && text[low - 1] !== ".") continue;
    found.push([low, high, chain, tld]);
    const isLabel = low < high && !"-_".includes(text[low]) && !"-_".includes(text[high - 1]);
    chain = (isLabel && chain) || (isLabel && !text.slice(low, high).includes("_") && tld) || 0;
    tld = low > start ? tldEnd(text, low) : 0; // the first label follows none
    high = low - 1;
  }
  return found.reverse();
}

/** Where a host may begin in a label; -1: nowhere. */
function hostStart(text, low, high, chain, tld) {
  if (!(chain || tld) || low >= high || "-_".includes(text[high - 1])) return -1;
  if (!chain) low = Math.max(low, text.lastIndexOf("_", high - 1) + 1);
  // twitter-text takes a text's first letter for the one before the host, if it's not ASCII.
  const second = low === 0 && high > 1 ? at(HOST_START, text.slice(0, high), 1) : null;
  const found = second?.index === 1 ? second : at(HOST_START, text.slice(0, high), low);
  return found ? found.index : -1;
}

function tldEnd(text, start) {
  for (let end = Math.min(text.length, start + TLD_CHARS_MAX); end > start; end--) {
    const goesOn = /[0-9A-Za-z@+-]/.test(text[end] ?? "");
    if (!goesOn && TLD_SET.has(text.slice(start, end).toLowerCase())) return end;
  }
  const punycode = at(PUNYCODE, text, start);
  return punycode ? start + punycode[0].length : 0;
}

function fitsDns(label) {
  if (label.length > LABEL_CHARS_MAX) return false;
  if (/^[\0-\x7f]*$/.test(label)) return true;
  try {
    return new URL(`http://${label}.com`).hostname.length - 4 <= LABEL_CHARS_MAX;
  } catch {
    return true;
  }
}

function withProtocol(text, start, host, end) {
  const tco = at(TCO, text.slice(0, end), start);
  if (host - start + end - start > URL_CHARS_MAX || tco?.[1].length > SLUG_CHARS_MAX) return [];
  return [[start, tco ? start + tco[0].length : end]];
}

/** The ASCII hosts within a host without a protocol; the path goes to the last of them. */
function bare(host, start, end, hasPath) {
  if ("https://".length + end - start > URL_CHARS_MAX) return [];
  const spans = asciiHosts(host).map(([low, high]) => [start + low, start + high]);
  if (spans.length && hasPath) spans.at(-1)[1] = end;
  return spans;
}

function asciiHosts(host) {
  const found = [];
  for (const match of host.matchAll(ASCII_LABELS)) {
    const last = match.index + match[0].length - 1;
    for (let dot = last; dot > match.index; dot--) {
      const end = host[dot] === "." && tldEnd(host, dot + 1);
      if (end) {
        found.push([match.index, end]);
        break;
      }
    }
  }
  return found;
}

// An emoji sequence weighs as one. How people type it, variation selectors may be missing: they are put in first.

const [CANDIDATE, RGI] = (() => {
  try {
    const part = "\\p{Emoji}(?:\\ufe0f|\\p{Emoji_Modifier})?\\u20e3?(?:[\\u{e0020}-\\u{e007e}]+\\u{e007f})?";
    return [
      new RegExp(`\\p{Regional_Indicator}{2}|${part}(?:\\u200d${part})*`, "uy"),
      new RegExp("^\\p{RGI_Emoji}$", "v"),
    ];
  } catch {
    return [null, null]; // a browser that doesn't know them counts their code points
  }
})();
const BARE_SYMBOL = /(\p{Emoji})(?!\ufe0f|\p{Emoji_Modifier}|[\u{e0020}-\u{e007f}])/gu;

function sequenceEnd(text, at) {
  if (!CANDIDATE) return 0;
  CANDIDATE.lastIndex = at;
  let sequence = CANDIDATE.exec(text)?.[0] ?? "";
  while ([...sequence].length > 1) {
    if (RGI.test(sequence) || RGI.test(qualified(sequence))) return at + sequence.length;
    sequence = [...sequence].slice(0, -1).join("");
  }
  return 0;
}

function qualified(sequence) {
  return sequence.replace(BARE_SYMBOL, (symbol) =>
    /\p{Emoji_Presentation}/u.test(symbol) ? symbol : `${symbol}\ufe0f`,
  );
}

const LIGHT = [
  [0, 4351],
  [8192, 8205],
  [8208, 8223],
  [8242, 8247],
];

/** The weighted length of a text, in NFC: at most MAX in a tweet. */
export function weigh(text) {
  text = text.normalize("NFC");
  const starts = new Map(text.length <= SCANNED_MAX ? links(text) : []);
  let weight = 0;
  for (let at = 0; at < text.length;) {
    const end = starts.get(at) ?? sequenceEnd(text, at);
    if (end) {
      weight += starts.has(at) ? URL_WEIGHT : 2;
      at = end;
      continue;
    }
    const code = text.codePointAt(at);
    weight += LIGHT.some(([low, high]) => low <= code && code <= high) ? 1 : 2;
    at += code > 0xffff ? 2 : 1;
  }
  return weight;
}

/** A text as pieces for a page: strings, `{link}` and `{mention}`. */
export function pieces(text) {
  const marks = links(text).map(([start, end]) => ({ start, end, link: text.slice(start, end) }));
  for (const match of text.matchAll(MENTION)) {
    const end = match.index + match[0].length;
    const start = end - match[1].length - 1;
    if (!marks.some((mark) => start < mark.end && end > mark.start)) marks.push({ start, end, mention: match[1] });
  }
  const found = [];
  let at = 0;
  for (const mark of marks.sort((a, b) => a.start - b.start)) {
    found.push(text.slice(at, mark.start), mark);
    at = mark.end;
  }
  return [...found, text.slice(at)].filter(Boolean);
}
