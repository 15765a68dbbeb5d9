// The decoder: reconstruction, a slider per pose dimension, a strip of all of them, a walk between two capsules.

import { decodeArray } from "./arrays.js";
import { TWO_COLORS, button, drawing, format, h, photo, pixelImage, s, slider, text } from "./dom.js";
import { shorten, targetOf } from "./classes.js";

const WIDTH = 420;
const STEPS = 11;
const STRIP_DELAY_MS = 250;
const TILE = [0, 18, 122, 122];
const strips = new Map(); // by run: {key, images, node}

/** Return the pose of a class capsule, with the sliders' changes. */
export function poseOf(ctx, run, target, withOffsets = true) {
  const result = ctx.results[run];
  result.pose ??= decodeArray(result.capsules.pose);
  const dim = result.pose.shape[1];
  const pose = result.pose.data.slice(target * dim, (target + 1) * dim);
  if (withOffsets) for (const [n, offset] of Object.entries(ctx.state.get().offsets)) if (n < dim) pose[n] += offset;
  return pose;
}

/** Return the decoder's input: zeros but for the given capsules, [[class, pose, factor], ...]. */
function masked(decoder, parts) {
  const values = new Float32Array(decoder.classes * decoder.dim);
  for (const [target, pose, factor] of parts) pose.forEach((value, n) => { values[target * decoder.dim + n] += factor * value; });
  return values;
}

/** Range of the sliders: the one of Sabour 2017, or half of the longest element if poses are larger. */
const rangeOf = (pose) => Math.max(0.25, Math.ceil(50 * Math.max(...[...pose].map(Math.abs))) / 100); // 0 is a step of the slider

export const decoderPanel = {
  id: "decoder",
  title: "Decoder",
  about: "The class capsule of the chosen class, decoded to an image. Each slider changes one element of the pose; the strip varies one element per row, the others unchanged.",
  needs: "decoder",
  wide: true,
  controls(ctx) {
    const run = ctx.info.runs.findIndex((info) => info.decoder);
    const sliders = h("div", { class: "sliders", role: "group", "aria-label": "Pose dimensions" });
    const reset = button("Reset sliders", () => ctx.state.set({ offsets: {} }), { id: "reset-pose" });
    const keep = button("Keep as A", () => {
      const target = targetOf(ctx, run);
      ctx.state.set({ kept: { target, pose: [...poseOf(ctx, run, target)].map((value) => Number(value.toFixed(5))) }, walk: 0 });
    }, { id: "keep", title: "Keep this capsule as the start of a walk" });
    const walk = slider("Walk from A to this", { min: 0, max: 1, step: 0.01, value: ctx.state.get().walk, id: "walk", change: (value) => ctx.state.set({ walk: value }) });
    let items = [];
    ctx.onResults(() => {
      const pose = poseOf(ctx, run, targetOf(ctx, run), false);
      const range = rangeOf(pose);
      const { offsets, kept } = ctx.state.get();
      if (items.length !== pose.length || items.range !== range) {
        items = [...pose].map((_, n) => slider(`dim ${n}`, {
          min: -range, max: range, step: 0.01, value: 0, id: `dim-${n}`,
          change: (value) => ctx.state.set({ offsets: { ...ctx.state.get().offsets, [n]: value } }),
        }));
        items.range = range;
        sliders.replaceChildren(...items);
      }
      items.forEach((item, n) => item.set(offsets[n] ?? 0));
      walk.set(ctx.state.get().walk);
      walk.classList.toggle("hidden", !kept);
    });
    return [h("div", { class: "row" }, reset, keep, walk), sliders];
  },
  async draw(ctx, run) {
    const { decoder, classes } = ctx.info.runs[run];
    const result = ctx.results[run];
    const state = ctx.state.get();
    const target = targetOf(ctx, run);
    const pose = poseOf(ctx, run, target);
    const inputs = [masked(decoder, [[target, pose, 1]])];
    const kept = state.kept && state.kept.pose.length === decoder.dim && state.kept.target < decoder.classes ? state.kept : null;
    if (kept) {
      inputs.push(masked(decoder, [[kept.target, kept.pose, 1]]));
      inputs.push(masked(decoder, [[kept.target, kept.pose, 1 - state.walk], [target, pose, state.walk]]));
    }
    const pair = pairOf(ctx, run);
    for (const other of pair) inputs.push(masked(decoder, [[other, poseOf(ctx, run, other, false), 1]]));
    const images = await ctx.backend.decode(run, inputs.flatMap((input) => [...input]), inputs.length, decoder);
    const size = decoder.image[0] * decoder.image[1] * decoder.image[2];
    ctx.decoded[run] = images.slice(0, size);
    const input = decodeArray(result.image);
    const tiles = [
      ["input", photo(input.data, input.shape, TILE)],
      [`decoded ${shorten(classes[target], 9)}`, photo(images, decoder.image, TILE)],
    ];
    if (kept) {
      tiles.push([`A: ${shorten(classes[kept.target], 9)}`, photo(images, decoder.image, TILE, size)]);
      tiles.push([`walk ${format(state.walk, 2)}`, photo(images, decoder.image, TILE, 2 * size)]);
    }
    if (pair.length) {
      const parts = [-2, -1].map((n) => images.slice((inputs.length + n) * size, (inputs.length + n + 1) * size));
      const blank = new Float32Array(size);
      const [first, second] = pair.map((other) => shorten(classes[other], 5));
      tiles.push([first, overlay(parts[0], blank, decoder.image)], [second, overlay(blank, parts[1], decoder.image)],
        [`${first} and ${second}`, overlay(...parts, decoder.image)]);
    }
    const perRow = tiles.length > 3 ? Math.ceil(tiles.length / 2) : Math.max(2, tiles.length);
    const width = perRow * 132; // the drawing fills its column, whatever the number of images
    const nodes = tiles.map(([name, image], n) => s("g", { transform: `translate(${(n % perRow) * 132} ${Math.floor(n / perRow) * 150})` }, text(0, 12, name, { class: "name" }), image));
    const error = Math.sqrt(ctx.decoded[run].reduce((sum, value, n) => sum + (value - (input.data[n] ?? 0)) ** 2, 0) / size);
    const label = `Input and reconstruction of ${classes[target]}; root mean squared difference ${format(error)}`;
    const strip = await drawStrip(ctx, run, target, pose, decoder);
    return h("div", { class: "split decoder" }, drawing(width, 150 * Math.ceil(tiles.length / perRow), label, nodes), strip);
  },
  data(ctx, run) {
    const target = targetOf(ctx, run);
    return { target, pose: [...poseOf(ctx, run, target)], image: ctx.info.runs[run].decoder.image, decoded: [...(ctx.decoded[run] ?? [])] };
  },
};

/** Return the two classes of an overlap: of a second image, or of a network for two objects. */
function pairOf(ctx, run) {
  const { n_objects: count } = ctx.info.runs[run];
  return ctx.state.get().second || count === 2 ? ctx.results[run].order.slice(0, 2) : [];
}

/** Return two reconstructions in one image, each in its own colour. */
function overlay(first, second, [, height, width]) {
  return pixelImage(height, width, TILE, (n) =>
    [0, 1, 2].map((c) => Math.min(255, first[n] * TWO_COLORS[0][c] + second[n] * TWO_COLORS[1][c])));
}

async function drawStrip(ctx, run, target, pose, decoder) {
  const range = rangeOf(poseOf(ctx, run, target, false));
  const halves = matchMedia("(max-width: 760px)").matches ? 1 : 2; // dimensions side by side; one on a phone
  const key = `${target}|${halves}|${[...pose].map((value) => value.toFixed(3)).join(",")}`;
  let strip = strips.get(run);
  if (strip && strip.key !== key && !strip.due) { // while a slider moves, only the image above follows
    clearTimeout(strip.timer);
    strip.timer = setTimeout(() => {
      strip.due = true;
      ctx.redraw("decoder");
    }, STRIP_DELAY_MS);
    return strip.node;
  }
  if (strip?.key !== key) {
    const inputs = [];
    for (let n = 0; n < pose.length; n += 1) {
      for (let step = 0; step < STEPS; step += 1) {
        const changed = Float32Array.from(pose);
        changed[n] += range * ((2 * step) / (STEPS - 1) - 1);
        inputs.push(masked(decoder, [[target, changed, 1]]));
      }
    }
    const total = inputs.length;
    const flat = new Float32Array(total * decoder.classes * decoder.dim);
    inputs.forEach((input, n) => flat.set(input, n * input.length));
    strip = { key, images: await ctx.backend.decode(run, flat, total, decoder) };
    strips.set(run, strip);
  }
  if (strip.node) return strip.node;
  const [channels, height, width] = decoder.image;
  const columns = STEPS * halves;
  const rows = Math.ceil(pose.length / halves);
  const plane = channels * height * width;
  const cell = (WIDTH - 40) / columns;
  const clear = [0, 0, 0, 0];
  const shown = [0, 0, 0]; // of all pixels: there are 100,000
  const second = channels === 3 ? plane / 3 : 0;
  const image = pixelImage(rows * height, columns * width, [18, 0, WIDTH - 20, rows * cell * (height / width)], (i) => {
    const x = i % (columns * width);
    const y = Math.floor(i / (columns * width));
    const column = Math.floor(x / width);
    const dimension = Math.floor(y / height) + rows * Math.floor(column / STEPS);
    if (dimension >= pose.length) return clear;
    const at = (dimension * STEPS + (column % STEPS)) * plane + (y % height) * width + (x % width);
    for (let c = 0; c < 3; c += 1) shown[c] = 255 * strip.images[at + c * second];
    return shown;
  });
  const labels = Array.from({ length: rows }, (_, n) => text(14, (n + 0.75) * cell * (height / width), n, { class: "tick small", "text-anchor": "end" }));
  const order = halves === 1 || rows === pose.length ? "one dimension per row" : `dimensions 0 to ${rows - 1} left, ${rows} to ${pose.length - 1} right`;
  const caption = text(18, rows * cell * (height / width) + 14, `${order}; −${format(range, 2)} to +${format(range, 2)}`, { class: "tick" });
  strip.node = drawing(WIDTH, rows * cell * (height / width) + 20, "All dimensions of the class capsule, varied one at a time", image, labels, caption);
  return strip.node;
}
