// Where the tokens of an output are in its text, and how two outputs differ.

const MAX_ALIGNED = 600;

/**
 * @typedef {{start: number, end: number, first: number, last: number}} Unit
 * Characters [start, end) of the text that tokens first to last make. Several tokens may be parts of
 * one character; a token that the text leaves out has an empty range.
 */

/** @param {string} text @param {{bytes: number[]}[]} tokens @returns {Unit[]} */
export function unitsOf(text, tokens) {
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const units = [];
  let at = 0;
  let first = 0;
  tokens.forEach(({ bytes }, index) => {
    const piece = decoder.decode(new Uint8Array(bytes), { stream: true });
    if (!piece && bytes.length && index + 1 < tokens.length) return;
    const [start, end] = placeOf(piece, text, at);
    units.push({ start, end, first, last: index });
    at = end;
    first = index + 1;
  });
  return units;
}

function placeOf(piece, text, at) {
  // Tokenizers that put a space before every text leave it out at the beginning.
  for (const form of at === 0 ? [piece, piece.trimStart()] : [piece])
    if (text.startsWith(form, at)) return [at, at + form.length];
  return [at, at];
}

/** The unit that has a character of the text. @param {Unit[]} units @param {number} offset */
export function unitAt(units, offset) {
  let low = 0;
  let high = units.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (units[middle].end > offset) high = middle;
    else low = middle + 1;
  }
  return units.length ? low : -1;
}

/**
 * @param {{id: number}[]} mine @param {{id: number}[]} its
 * @returns {{first: number, others: number[]}} the first token that differs (-1: none), and those
 *   behind it that have no partner: they come after different texts, so this is for the eye only
 */
export function differences(mine, its) {
  const length = Math.min(mine.length, its.length);
  let first = 0;
  while (first < length && mine[first].id === its[first].id) first += 1;
  if (first === mine.length && first === its.length) return { first: -1, others: [] };
  const rest = mine.slice(first + 1, first + MAX_ALIGNED).map(({ id }) => id);
  const paired = common(rest, its.slice(first + 1, first + MAX_ALIGNED).map(({ id }) => id));
  return { first, others: rest.flatMap((_, i) => (paired.has(i) ? [] : [first + 1 + i])) };
}

/** Indexes in `left` of a longest common subsequence. */
function common(left, right) {
  const width = right.length + 1;
  const lengths = new Uint16Array((left.length + 1) * width);
  for (let i = left.length - 1; i >= 0; i--)
    for (let j = right.length - 1; j >= 0; j--)
      lengths[i * width + j] =
        left[i] === right[j]
          ? lengths[(i + 1) * width + j + 1] + 1
          : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
  const found = new Set();
  for (let i = 0, j = 0; i < left.length && j < right.length; ) {
    if (left[i] === right[j]) {
      found.add(i);
      i += 1;
      j += 1;
    } else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return found;
}
