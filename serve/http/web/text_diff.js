// What a pass changed in a program's text.

const NUMBERED = /%\d+\b/g; // values are numbered anew after every pass

/** Beyond this many edits two texts have little in common, and finding out takes long. */
const MAX_EDITS = 2500;

/**
 * Lines of `after` and those of `before` that are gone, in order: {sign: " " | "+" | "-", text}. Lines are equal whatever
 * their values are numbered. Null if too much changed. Myers 1986, An O(ND) difference algorithm.
 */
export function diff(before, after, maxEdits = MAX_EDITS) {
  const [old, now] = [before.split("\n"), after.split("\n")];
  const [oldKeys, nowKeys] = [old, now].map((lines) => lines.map((line) => line.replace(NUMBERED, "%")));
  const middle = maxEdits + 1;
  const reached = new Int32Array(2 * middle + 1).fill(-1); // by diagonal x - y, how far into the old lines
  reached[middle + 1] = 0;
  const rounds = []; // reached as it was before each round, for the way back
  for (let edits = 0; edits <= maxEdits; edits += 1) {
    rounds.push(reached.slice(middle - edits - 1, middle + edits + 2));
    for (let diagonal = -edits; diagonal <= edits; diagonal += 2) {
      const [left, right] = [reached[middle + diagonal - 1], reached[middle + diagonal + 1]];
      let x = isInsert(diagonal, edits, left, right) ? right : left + 1;
      while (x < old.length && x - diagonal < now.length && oldKeys[x] === nowKeys[x - diagonal]) x += 1;
      reached[middle + diagonal] = x;
      if (x >= old.length && x - diagonal >= now.length) return wayBack(rounds, old, now);
    }
  }
  return null;
}

function isInsert(diagonal, edits, left, right) {
  return diagonal === -edits || (diagonal !== edits && left < right);
}

function wayBack(rounds, old, now) {
  const lines = [];
  let [x, y] = [old.length, now.length];
  for (let edits = rounds.length - 1; edits > 0; edits -= 1) {
    const at = x - y + edits + 1; // the index of this diagonal in the state before the round
    const [left, right] = [rounds[edits][at - 1], rounds[edits][at + 1]];
    const inserts = isInsert(x - y, edits, left, right);
    const fromX = inserts ? right : left;
    const fromY = fromX - (x - y) - (inserts ? 1 : -1);
    for (const begin = inserts ? fromX : fromX + 1; x > begin; x -= 1, y -= 1) lines.push({ sign: " ", text: now[y - 1] });
    lines.push(inserts ? { sign: "+", text: now[y - 1] } : { sign: "-", text: old[x - 1] });
    [x, y] = [fromX, fromY];
  }
  for (; y > 0; y -= 1) lines.push({ sign: " ", text: now[y - 1] });
  return lines.reverse();
}

/** Lines that changed with `around` lines about them; where some are left out a line says how many. */
export function excerpt(lines, around = 2) {
  const isNear = lines.map((_, index) => lines.slice(Math.max(0, index - around), index + around + 1).some((line) => line.sign !== " "));
  const found = [];
  for (let index = 0; index < lines.length; index += 1) {
    if (isNear[index]) {
      found.push(lines[index]);
      continue;
    }
    let end = index;
    while (end < lines.length && !isNear[end]) end += 1;
    found.push({ sign: "…", text: `${end - index} lines as before` });
    index = end - 1;
  }
  return found;
}
