// Credit of each pixel for a class: coupling times activity projected back, and the gradient.

import { decodeArray } from "./arrays.js";
import { MAPS, colorAt, drawing, format, h, matrixImage, photo, pixelImage, text, withCellTips } from "./dom.js";
import { shorten, targetOf } from "./classes.js";
import { imageOf } from "./state.js";

const EPS = 1e-5; // relative differences below are rounding errors
const OUTSIDE = [128, 128, 128, 70]; // colour of pixels that no capsule sees

export const creditPanel = {
  id: "credit",
  title: "Credit of pixels",
  about: "Where the score of the chosen class comes from. Couplings: a child gets coupling × activity from each parent; a pixel gets the mean of the capsules that see it. Gradient: orange pixels raise the score if they become brighter, purple ones lower it.",
  async draw(ctx, run) {
    const target = targetOf(ctx, run);
    const state = ctx.state.get();
    const credit = await ctx.backend.credit({ run, image: imageOf(state), target, iterations: state.iterations });
    ctx.credits[run] = { target, ...credit };
    const [height, width] = credit.size;
    const image = decodeArray(ctx.results[run].image);
    const size = 126;
    const maps = [];
    const notes = credit.why ? [`Couplings: ${credit.why.replace(/\.$/, "")}.`] : [];
    if (credit.coupling) {
      const { data } = decodeArray(credit.coupling);
      const seen = data.filter((value) => value !== 0); // others are outside of all receptive fields
      const [low, high] = [Math.min(...seen), Math.max(...seen)];
      const flat = !seen.length || high - low <= EPS * Math.max(Math.abs(high), Math.abs(low)); // one position: rounding errors
      if (flat) notes.push("Couplings: every pixel has the same credit, because the primary capsules have one position, or no couplings.");
      const signed = low < 0 && !flat;
      const range = Math.max(-low, high);
      const map = signed ? MAPS.puor : MAPS.viridis;
      const fraction = (value) => (flat ? 0.5 : signed ? 0.5 + value / (2 * range) : (value - low) / (high - low));
      maps.push(["couplings", data, pixelImage(height, width, [146, 18, size, size], (n) => (data[n] === 0 ? OUTSIDE : colorAt(map, fraction(data[n])))),
        flat ? null : { map, low: signed ? -range : low, high: signed ? range : high }]);
    }
    const gradient = decodeArray(credit.gradient).data;
    const range = Math.max(...[...gradient].map(Math.abs), 1e-12);
    maps.push(["gradient", gradient, pixelImage(height, width, [146 * (maps.length + 1), 18, size, size], (n) => colorAt(MAPS.puor, 0.5 + gradient[n] / (2 * range))),
      { map: MAPS.puor, low: -range, high: range }]);
    const name = shorten(ctx.info.runs[run].classes[target], 12);
    return h("div", {},
      drawing(420, 172, `Credit of the pixels for ${name}, score ${format(credit.score)}`,
        text(0, 12, "input", { class: "name" }), photo(image.data, image.shape, [0, 18, size, size]),
        maps.map(([label, values, node, scale], n) => [text(146 * (n + 1), 12, `${label} for ${name}`, { class: "name" }), scale && legend(146 * (n + 1), size, scale),
          withCellTips(node, height, width, (row, column) => `${label} at row ${row}, column ${column}: ${format(values[row * width + column], 4)}`)])),
      notes.map((note) => h("p", { class: "reason" }, note)));
  },
  data: (ctx, run) => {
    const credit = ctx.credits[run];
    return credit && { target: credit.target, size: credit.size, coupling: credit.coupling && [...decodeArray(credit.coupling).data], gradient: [...decodeArray(credit.gradient).data] };
  },
};

/** Return the scale of a map below it. */
function legend(left, size, { map, low, high }) {
  const ramp = matrixImage(Array.from({ length: 40 }, (_, n) => n / 39), 1, 40, [left, size + 24, size, 6], (value) => colorAt(map, value));
  const digits = Math.min(6, Math.max(2, 1 - Math.floor(Math.log10(Math.max(high - low, 1e-9)))));
  return [ramp, text(left, size + 43, format(low, digits), { class: "tick" }), text(left + size, size + 43, format(high, digits), { class: "tick", "text-anchor": "end" })];
}
