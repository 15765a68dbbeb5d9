// The state of the page: what is shown, not what was computed. It is kept in the URL, so that a link shares it.

const IDENTITY = { rotation: 0, scale: 1, shear: 0, right: 0, down: 0 };
const DEFAULTS = {
  source: { sample: 0 }, // {sample: index} or {pixels: base64}
  placement: IDENTITY,
  second: null, // a second source, drawn over the first
  secondPlacement: { ...IDENTITY, right: 0.15, down: 0.15 },
  attack: null, // {method, eps, steps}
  iterations: null, // as trained
  t: null, // iteration shown; null: the last
  layer: null, // capsule layer shown; null: the last
  site: null, // [row, column] of the parents of a convolutional layer
  parent: 0, // of a layer that is not the last, for the equation
  target: null, // class of decoder, credit and equation; null: the predicted one
  view: "maps", // of the couplings
  type: 0, // of the primary capsules
  threshold: 0.35, // of the parse tree
  offsets: {}, // changes of pose dimensions by the decoder's sliders
  kept: null, // {target, pose}: start of the walk between two capsules
  walk: 0,
};

// What a link may contain: anybody can write one.
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const isIndex = (value) => Number.isInteger(value) && value >= 0;
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isSource = (value) => isObject(value) && Object.keys(value).length === 1 && (isIndex(value.sample) || typeof value.pixels === "string");
const isPlacement = (value) => isObject(value) && Object.keys(IDENTITY).every((name) => isNumber(value[name]));
const isNumbers = (value) => Array.isArray(value) && value.every(isNumber);
const orNull = (check) => (value) => value === null || check(value);
const VALID = {
  source: isSource, placement: isPlacement, second: orNull(isSource), secondPlacement: isPlacement,
  attack: orNull((value) => isObject(value) && ["fgsm", "pgd"].includes(value.method) && isNumber(value.eps) && isIndex(value.steps)),
  iterations: orNull(isIndex), t: orNull(isIndex), layer: orNull(isIndex), site: orNull((value) => isNumbers(value) && value.length === 2),
  parent: isIndex, target: orNull(isIndex), view: (value) => ["maps", "matrix"].includes(value), type: isIndex, threshold: isNumber,
  offsets: (value) => isObject(value) && Object.values(value).every(isNumber),
  kept: orNull((value) => isObject(value) && isIndex(value.target) && isNumbers(value.pose)), walk: isNumber,
};

const copy = (value) => JSON.parse(JSON.stringify(value));

/** Return a store: `get()`, `set(changes)`, `subscribe(listener)`, with the state in the URL's fragment. */
export function createState() {
  let state = { ...copy(DEFAULTS), ...fromURL() };
  const listeners = [];
  let timer = 0;

  function remember() {
    clearTimeout(timer);
    timer = setTimeout(() => history.replaceState(null, "", toURL(state)), 250);
  }

  return {
    get: () => state,
    set(changes) {
      const before = state;
      state = { ...state, ...changes };
      remember();
      const changed = new Set(Object.keys(changes).filter((key) => JSON.stringify(before[key]) !== JSON.stringify(state[key])));
      if (changed.size) for (const listener of listeners) listener(changed, state);
    },
    reload() {
      state = { ...copy(DEFAULTS), ...fromURL() };
      for (const listener of listeners) listener(new Set(Object.keys(state)), state);
    },
    subscribe: (listener) => listeners.push(listener),
    link: () => new URL(toURL(state), location.href).href,
  };
}

/** Return the fragment: the fields that differ from their defaults, as JSON in base64url. */
export function toURL(state) {
  const changed = Object.fromEntries(
    Object.entries(state).filter(([key, value]) => JSON.stringify(value) !== JSON.stringify(DEFAULTS[key])),
  );
  if (!Object.keys(changed).length) return location.pathname;
  return `#${btoa(JSON.stringify(changed)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "")}`;
}

function fromURL() {
  try {
    const text = atob(location.hash.slice(1).replaceAll("-", "+").replaceAll("_", "/"));
    const state = JSON.parse(text);
    return Object.fromEntries(Object.entries(state).filter(([key, value]) => VALID[key]?.(value)));
  } catch {
    return {}; // no state, or a damaged link
  }
}

/** Return the part of the state that determines the network's input, as the API takes it. */
export function imageOf(state) {
  return {
    source: state.source,
    placement: state.placement,
    second: state.second,
    second_placement: state.secondPlacement,
    attack: state.attack,
  };
}

export const identity = () => ({ ...IDENTITY });
export const INPUT_FIELDS = ["source", "placement", "second", "secondPlacement", "attack", "iterations", "site"];
