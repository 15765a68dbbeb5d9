// A tour in eight steps: it starts with a drawn digit that one slider turns into another.

import { button, h } from "./dom.js";
import { identity } from "./state.js";

// A seven, drawn with two strokes, in 0..1.
export const SEVEN = [
  [[0.28, 0.24], [0.4, 0.23], [0.55, 0.23], [0.7, 0.24], [0.66, 0.34], [0.6, 0.46], [0.54, 0.58], [0.49, 0.7], [0.46, 0.82]],
];
const NINE = [
  [[0.66, 0.36], [0.6, 0.27], [0.5, 0.24], [0.39, 0.29], [0.35, 0.4], [0.41, 0.49], [0.52, 0.5], [0.62, 0.44], [0.66, 0.36],
    [0.65, 0.5], [0.62, 0.66], [0.58, 0.82]],
];

const pause = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

const STEPS = [
  ["input", "A network reads a digit", "This seven was drawn with a few points. You can draw on the surface yourself, pick one of the test images, or upload a file.",
    async (ctx) => {
      if (!ctx.backend.isFile) ctx.actions.tab("draw");
      await draw(ctx, SEVEN, 0);
    }],
  ["decoder", "One slider turns it into another digit", "A capsule network describes the digit by one vector, its class capsule, and can draw the image from it. Move “Walk from A to this”: the capsule of the seven becomes that of a nine, and the decoded image follows.",
    async (ctx) => {
      await draw(ctx, SEVEN, 0);
      document.getElementById("keep")?.click();
      await draw(ctx, NINE, 1);
      ctx.state.set({ walk: 0.5 });
      document.getElementById("walk")?.focus();
    }],
  ["classes", "Length means presence", "There is one capsule per class. The longer its vector, the surer the network is that the class is there. The dashed lines are the margins it was trained with."],
  ["primary", "Primary capsules", "The lowest capsules describe parts of the image. Colour is their length; the rays show the pose: the same part in another position or tilt has other rays."],
  ["couplings", "Routing by agreement", "Each child predicts the pose of every parent. Routing decides in a few iterations which predictions count: step through them and watch the couplings move away from uniform.",
    async (ctx) => ctx.state.set({ t: 0 })],
  ["tree", "The parse tree", "The strongest connections form a tree over the image: parts that agree on one digit are assigned to it. Change the threshold to see more.",
    async (ctx) => ctx.state.set({ t: null })],
  ["input", "Move the digit", "Rotate, scale or shift the image, or press Play. Lengths, poses and the reconstruction follow.",
    async (ctx) => ctx.state.set({ placement: { ...identity(), rotation: 15 } })],
  ["stats", "And on the whole test set", "Select a cell of the confusion matrix to see those images. “Share” copies a link to what you see now. Press ? for the keys.",
    async (ctx) => ctx.state.set({ placement: identity() })],
];

// An exported file has samples instead of a surface, and images that do not move: other texts, or no step.
const FILE_TEXTS = {
  "A network reads a digit": "This is one of the test images in this file. Pick another one from the samples.",
  "One slider turns it into another digit": "A capsule network describes the digit by one vector, its class capsule, and can draw the image from it. Move “Walk from A to this”: the capsule of the first image becomes that of the second, and the decoded image follows.",
  "Move the digit": null,
};

// Other texts for a network without a part, or no step.
const TEXTS_WITHOUT = {
  iterations: {
    "Routing by agreement": "Each child predicts the pose of every parent. Routing decides which predictions count, in this network in one pass; most routings take a few iterations, which can be stepped through here.",
  },
  decoder: { "One slider turns it into another digit": null, "Move the digit": "Rotate, scale or shift the image, or press Play. Lengths and poses follow." },
  capsules: {
    "Length means presence": "This network has no capsules: the bars are its scores of the classes.",
    "Primary capsules": null,
    "Routing by agreement": null,
    "The parse tree": null,
    "Move the digit": "Rotate, scale or shift the image, or press Play. The scores follow.",
  },
};

/** Return the text of a step for these runs; null if there is no such step. */
function textOf(ctx, [, heading, content]) {
  let text = content;
  for (const [part, texts] of Object.entries(TEXTS_WITHOUT)) {
    if (heading in texts && ctx.info.runs.every((run) => run.missing[part])) text = texts[heading];
  }
  if (ctx.backend.isFile && heading in FILE_TEXTS && text !== null) text = FILE_TEXTS[heading];
  return text;
}

/** Draw strokes, or show a sample of an exported file, and wait for the result. */
async function draw(ctx, strokes, sample) {
  const before = ctx.version;
  const source = JSON.stringify(ctx.state.get().source);
  if (!ctx.backend.isFile) {
    ctx.sketch.load(strokes);
    if (JSON.stringify(ctx.state.get().source) === source) return; // it is already shown
  }
  else {
    const next = ctx.backend.data.order[sample];
    if (next === undefined || next === ctx.state.get().source.sample) return;
    ctx.state.set({ source: { sample: next }, target: null, offsets: {} });
  }
  for (let n = 0; n < 100 && ctx.version === before; n += 1) await pause(30);
}

/** Start the tour at its first step. */
export function startTour(ctx) {
  document.querySelector(".tour")?.remove();
  const steps = STEPS.filter((step) => textOf(ctx, step) !== null);
  const title = h("h2", { id: "tour-title" });
  const body = h("p", {});
  const count = h("span", { class: "count" });
  let index = 0;
  let marked = null;
  const end = () => {
    marked?.classList.remove("marked");
    root.remove();
  };
  const back = button("Back", () => show(index - 1));
  const next = button("Next", () => (index + 1 < steps.length ? show(index + 1) : end()), { class: "primary", id: "tour-next" });
  const root = h("div", { class: "tour", role: "dialog", "aria-labelledby": "tour-title", "aria-live": "polite" },
    title, body, h("div", { class: "row" }, count, button("End", end, { id: "tour-end" }), back, next));
  document.body.append(root);
  root.addEventListener("keydown", (event) => event.key === "Escape" && end());
  async function show(step) {
    index = step;
    const [panel, heading, , action] = steps[step];
    title.textContent = heading;
    body.textContent = textOf(ctx, steps[step]);
    count.textContent = `${step + 1} of ${steps.length}`;
    back.disabled = step === 0;
    next.textContent = step + 1 < steps.length ? "Next" : "Finish";
    marked?.classList.remove("marked");
    marked = document.querySelector(panel === "input" ? ".panel.input" : `#panel-${panel}`);
    marked?.classList.add("marked");
    marked?.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth", block: "start" });
    next.focus({ preventScroll: true });
    await action?.(ctx);
  }
  show(0);
}
