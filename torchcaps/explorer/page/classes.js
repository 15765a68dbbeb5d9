// Class capsules: scores as bars, with the margins of the loss.

import { drawing, format, s, selectable, text } from "./dom.js";

const MAX_BARS = 12;
const WIDTH = 420;
const ROW = 24;

/** Return the class that decoder, credit and equation show: the chosen one, or that with the highest score. */
export function targetOf(ctx, run) {
  const { target } = ctx.state.get();
  const result = ctx.results[run];
  return target !== null && target < result.order.length ? target : result.order[0];
}

export const classesPanel = {
  id: "classes",
  title: "Class capsules",
  about: "The score of each class, highest first. Dashed lines are the margins of the loss: below the first a class counts as absent, above the second as present. A loss without margins has one line, at 0.5. Select a class to follow it in the other panels.",
  draw(ctx, run) {
    const { classes, margins, score } = ctx.info.runs[run];
    const result = ctx.results[run];
    const shown = result.order.slice(0, MAX_BARS);
    const longest = Math.max(...shown.map((index) => classes[index].length));
    const left = Math.min(30 + 7 * longest, 150);
    const right = 62;
    const scale = (value) => left + (WIDTH - left - right) * Math.min(Math.max(value, 0), 1);
    const target = targetOf(ctx, run);
    const bars = shown.map((index, row) => bar(ctx, result, classes, index, row, left, scale, target));
    const height = ROW * shown.length + 26;
    const lines = (margins ?? [0.5]).map((margin) => [
      s("line", { x1: scale(margin), x2: scale(margin), y1: 0, y2: ROW * shown.length + 6, class: "margin" }),
      text(scale(margin), ROW * shown.length + 19, format(margin, 1), { class: "tick", "text-anchor": "middle" }),
    ]);
    const names = result.predicted.map((index) => classes[index]).join(" and ") || "no class";
    const label = `Predicted: ${names}. ${shown.slice(0, 3).map((i) => `${classes[i]} ${format(result.probabilities[i])}`).join(", ")}`;
    return drawing(WIDTH, height, `${score} by class. ${label}`, bars, lines);
  },
  data: (ctx, run) => {
    const { classes, score, margins } = ctx.info.runs[run];
    const { probabilities, scores, predicted, labels } = ctx.results[run];
    return { quantity: score, margins, classes, probabilities, scores, predicted, labels };
  },
};

function bar(ctx, result, classes, index, row, left, scale, target) {
  const value = result.probabilities[index];
  const y = ROW * row;
  const isLabel = result.labels?.includes(index);
  const kind = result.predicted.includes(index) ? "predicted" : "other";
  const label = `${classes[index]}: ${format(value)}${isLabel ? ", the label" : ""}`;
  const group = s("g", {
    class: `bar ${kind}${index === target ? " target" : ""}`, "data-class": index, "data-value": value.toFixed(6),
    ...selectable(`class ${index}`, label, () => ctx.state.set({ target: index, offsets: {} }), index === target),
  });
  group.append(
    s("rect", { x: 0, y, width: WIDTH, height: ROW, class: "hit" }),
    text(left - 8, y + 16, shorten(classes[index], 18) + (isLabel ? " ✓" : ""), { "text-anchor": "end", class: "name" }),
    s("rect", { x: left, y: y + 5, width: WIDTH - left - 62, height: ROW - 10, class: "track" }),
    s("rect", { x: left, y: y + 5, width: Math.max(0.5, scale(value) - left), height: ROW - 10, class: "value", rx: 1.5 }),
    text(WIDTH - 54, y + 16, format(value), { class: "number" }),
  );
  return group;
}

export const shorten = (name, length) => (name.length > length ? `${name.slice(0, length - 1)}…` : name);
