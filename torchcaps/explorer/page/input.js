// The input: draw, pick or upload an image, move it, lay a second one over it, attack it.

import { decodeArray } from "./arrays.js";
import { MAPS, button, colorAt, format, h, pixelImage, photo, s, select, slider } from "./dom.js";
import { downloadMenu } from "./download.js";
import { sentence } from "./panel.js";
import { Sketch } from "./sketch.js";
import { identity } from "./state.js";

const PAGE_SIZE = 12;
const MOTION_MS = 60;
const MOTIONS = { rotation: [-30, 30], scale: [0.7, 1.3], shear: [-0.6, 0.6], right: [-0.2, 0.2], down: [-0.2, 0.2] };

/** Build the panel of the input; returns its root. */
export function createInput(ctx) {
  const [channels, height, width] = ctx.info.runs[0].shape;
  const canvas = h("canvas", { id: "canvas", width, height, tabindex: 0, role: "img", "aria-label": "Input of the network" });
  const message = h("p", { class: "message", role: "status", "aria-live": "polite", id: "message" });
  const sketch = new Sketch(canvas, [channels, height, width], (pixels) => ctx.state.set({ source: { pixels }, target: null, offsets: {} }));
  ctx.sketch = sketch;
  ctx.onResults(() => paint(canvas, ctx.results[0].image));
  const tabs = createTabs(ctx, sketch);
  const surface = h("div", { class: "surface" }, canvas);
  const menu = downloadMenu("Input", () => [{ name: `${ctx.info.runs[0].name}-input`, body: surface, data: inputData(ctx) }]);
  const root = h("section", { class: "panel input", id: "panel-input", "aria-labelledby": "title-input" },
    h("header", {}, h("h2", { id: "title-input" }, "Input"), menu), surface, message, tabs);
  if (!ctx.backend.isFile) root.append(createPlacement(ctx), createOverlap(ctx), createAttack(ctx));
  else root.append(h("p", { class: "reason" }, ctx.backend.data.reason));
  return root;
}

function inputData(ctx) {
  const { image, clean, labels } = ctx.results[0];
  const values = (array) => array && [...decodeArray(array).data];
  return { panel: "input", state: ctx.state.get(), result: { shape: image.shape, labels, pixels: values(image), clean: values(clean) } };
}

function paint(canvas, array) {
  const { data, shape: [channels, height, width] } = decodeArray(array);
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(width, height);
  const plane = height * width;
  for (let i = 0; i < plane; i += 1) {
    const color = [0, 1, 2].map((c) => 255 * data[(channels === 3 ? c : 0) * plane + i]);
    pixels.data.set([...color, 255], 4 * i);
  }
  context.putImageData(pixels, 0, 0);
}

// Draw, pick, upload ----------------------------------------------------------------------------------------

function createTabs(ctx, sketch) {
  const parts = [];
  const isFile = ctx.backend.isFile;
  if (!isFile) parts.push(["draw", "Draw", drawTools(ctx, sketch)]);
  parts.push(["pick", "Samples", createPicker(ctx)]);
  if (!isFile) parts.push(["upload", "Upload", createUpload(ctx)]);
  const list = h("div", { class: "tabs", role: "tablist", "aria-label": "Source of the image" });
  const bodies = h("div", {});
  const show = (chosen) => {
    sketch.enabled = chosen === "draw";
    sketch.canvas.classList.toggle("drawable", sketch.enabled);
    for (const [id, , body] of parts) {
      body.hidden = id !== chosen;
      const tab = list.querySelector(`#tab-${id}`);
      tab.setAttribute("aria-selected", String(id === chosen));
      tab.tabIndex = id === chosen ? 0 : -1; // the arrow keys reach the others
    }
  };
  for (const [id, name, body] of parts) {
    list.append(button(name, () => show(id), { role: "tab", id: `tab-${id}`, "aria-controls": `tabpanel-${id}` }));
    body.id = `tabpanel-${id}`;
    body.setAttribute("role", "tabpanel");
    body.setAttribute("aria-labelledby", `tab-${id}`);
    bodies.append(body);
  }
  list.addEventListener("keydown", (event) => {
    const ids = parts.map(([id]) => id);
    const now = ids.findIndex((id) => event.target.id === `tab-${id}`);
    const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: -1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    event.stopPropagation(); // elsewhere the arrows turn the samples
    show(ids.at(next % ids.length));
    list.querySelector(`#tab-${ids.at(next % ids.length)}`).focus();
  });
  ctx.actions.tab = show;
  show(isFile || (!("pixels" in ctx.state.get().source) && ctx.info.runs[0].n_samples) ? "pick" : "draw");
  return h("div", {}, list, bodies);
}

function drawTools(ctx, sketch) {
  const color = h("input", { type: "color", value: "#ffffff", "aria-label": "Colour of the brush", oninput: () => { sketch.color = color.value; } });
  const centred = h("input", { type: "checkbox", checked: sketch.centred, onchange: () => { sketch.centred = centred.checked; } });
  return h("div", { class: "row" },
    button("Clear", () => sketch.clear(), { id: "clear" }), button("Undo", () => sketch.undo()),
    sketch.shape[0] === 3 ? color : null,
    sketch.shape[0] === 1 ? h("label", { class: "check", title: "Scale and centre the drawing as MNIST's digits were" }, centred, "centre") : null);
}

function createPicker(ctx) {
  const grid = h("div", { class: "thumbs" });
  const status = h("p", { class: "count", "aria-live": "polite" });
  const query = { run: 0, sort: "index", true: null, predicted: null, offset: 0, limit: PAGE_SIZE };
  let total = 0;
  const order = select("Sort", [["index", "mixed"], ["error", "errors first"], ["uncertainty", "uncertain first"]], "index", (value) => load({ sort: value, offset: 0 }), "sort");
  const all = button("All", () => load({ true: null, predicted: null, offset: 0 }), { class: "hidden" });
  const { classes } = ctx.info.runs[0];
  async function load(changes = {}) {
    Object.assign(query, changes);
    const reply = await ctx.backend.samples(query);
    total = reply.total;
    grid.replaceChildren(...reply.samples.map((sample) => thumb(ctx, sample, classes)));
    const filtered = query.true !== null || query.predicted !== null;
    all.classList.toggle("hidden", !filtered);
    const filter = filtered ? ` with label ${classes[query.true]} predicted as ${classes[query.predicted]}` : "";
    const waiting = reply.ready || query.sort === "index" ? "" : " (sorted once predictions are computed)";
    status.textContent = total ? `${query.offset + 1} to ${Math.min(query.offset + PAGE_SIZE, total)} of ${total}${filter}${waiting}` : `no images${filter}`;
    mark(ctx, grid);
  }
  const turn = (by) => load({ offset: Math.max(0, Math.min(query.offset + by * PAGE_SIZE, total - 1 - ((total - 1) % PAGE_SIZE))) });
  ctx.actions.showSamples = (filter) => { ctx.actions.tab("pick"); load({ ...filter, offset: 0 }); };
  ctx.actions.reloadSamples = () => load();
  ctx.actions.next = (by) => {
    const { sample } = ctx.state.get().source;
    const order = ctx.backend.isFile ? ctx.backend.data.order : null;
    const count = ctx.info.runs[0].n_samples;
    const known = [...grid.querySelectorAll("[data-sample]")].map((node) => Number(node.dataset.sample));
    const at = (index, step) => (((index + step) % count) + count) % count;
    const place = known.indexOf(sample);
    const next = place >= 0 && known[place + by] !== undefined ? known[place + by] : at(order?.indexOf(sample) ?? sample ?? 0, by);
    if (count) ctx.state.set({ source: { sample: place >= 0 && known[place + by] !== undefined ? next : (order?.[next] ?? next) }, target: null, offsets: {} });
  };
  ctx.onResults(() => mark(ctx, grid));
  const { samples } = ctx.info.runs[0].missing;
  if (samples) return h("div", {}, h("p", { class: "reason" }, sentence(samples)));
  load();
  return h("div", {}, h("div", { class: "row" }, order, all), grid,
    h("div", { class: "row" }, button("‹", () => turn(-1), { "aria-label": "Previous page" }), status, button("›", () => turn(1), { "aria-label": "Next page" })));
}

function thumb(ctx, sample, classes) {
  const { data, shape } = decodeArray(sample.image);
  const svg = s("svg", { viewBox: "0 0 40 40", "aria-hidden": "true" }, photo(Float32Array.from(data, (value) => value / 255), shape, [0, 0, 40, 40]));
  const names = (indices) => indices.map((index) => classes[index]).join(" and ");
  const wrong = sample.predicted && String(sample.predicted) !== String(sample.labels);
  const label = `sample ${sample.index}, ${names(sample.labels)}${wrong ? `, predicted as ${names(sample.predicted) || "none"}` : ""}`;
  return h("button", { type: "button", class: `thumb${wrong ? " wrong" : ""}`, "data-sample": sample.index, "aria-label": label, title: label,
    onclick: () => ctx.state.set({ source: { sample: sample.index }, target: null, offsets: {} }) }, svg);
}

function mark(ctx, grid) {
  const { sample } = ctx.state.get().source;
  for (const node of grid.children) node.setAttribute("aria-pressed", String(Number(node.dataset.sample) === sample));
}

function createUpload(ctx) {
  async function send(file) {
    if (!file) return;
    try {
      const reply = await ctx.backend.upload(file);
      note.textContent = reply.note ? sentence(reply.note) : "";
      ctx.state.set({ source: { pixels: reply.pixels }, target: null, offsets: {} });
    } catch (error) {
      note.textContent = sentence(error);
    }
  }
  const note = h("p", { class: "note", role: "status", id: "upload-note" });
  const input = h("input", { type: "file", accept: "image/*", id: "upload", "aria-label": "Image file", onchange: () => send(input.files[0]) });
  const zone = h("div", { class: "drop" }, input, h("p", {}, "or drop a file here: PNG, JPEG, WebP, GIF, BMP, up to 5 MB"), note);
  zone.addEventListener("dragover", (event) => event.preventDefault());
  zone.addEventListener("drop", (event) => { event.preventDefault(); send(event.dataTransfer.files[0]); });
  return zone;
}

// Placement, overlap, attack --------------------------------------------------------------------------------

function placementSliders(ctx, field, names, prefix) {
  const ranges = { rotation: [-180, 180, 1, "°"], scale: [0.4, 1.8, 0.01, ""], shear: [-1, 1, 0.01, ""], right: [-0.5, 0.5, 0.01, ""], down: [-0.5, 0.5, 0.01, ""] };
  const sliders = names.map((name) => {
    const [min, max, step, unit] = ranges[name];
    const control = slider(name, { min, max, step, unit, value: ctx.state.get()[field][name], id: `${prefix}${name}`, change: (value) => ctx.state.set({ [field]: { ...ctx.state.get()[field], [name]: value } }) });
    ctx.state.subscribe(() => control.set(ctx.state.get()[field][name]));
    return control;
  });
  return sliders;
}

function createPlacement(ctx) {
  let timer = 0;
  let phase = 0;
  const motion = select("Motion", Object.keys(MOTIONS).map((name) => [name, name]), "rotation", () => {}, "motion");
  const play = button("Play", () => {
    if (timer) {
      clearInterval(timer);
      timer = 0;
    } else {
      phase = 0;
      timer = setInterval(() => {
        const name = motion.input.value;
        const [low, high] = MOTIONS[name];
        phase += MOTION_MS / 500;
        const value = (low + high) / 2 + ((high - low) / 2) * Math.sin(phase);
        ctx.state.set({ placement: { ...ctx.state.get().placement, [name]: Number(value.toFixed(3)) } });
      }, MOTION_MS);
    }
    play.textContent = timer ? "Pause" : "Play";
  }, { id: "play-motion" });
  return h("details", { class: "group", open: true }, h("summary", {}, "Move"),
    ...placementSliders(ctx, "placement", ["rotation", "scale", "shear", "right", "down"], ""),
    h("div", { class: "row" }, motion, play, button("Reset", () => ctx.state.set({ placement: identity() }))));
}

function createOverlap(ctx) {
  const count = ctx.info.runs[0].n_samples;
  const toggle = button("Add a second image", () => {
    const { second } = ctx.state.get();
    ctx.state.set({ second: second ? null : { sample: Math.floor(Math.random() * count) }, target: null });
  }, { id: "second" });
  const other = button("Another", () => ctx.state.set({ second: { sample: Math.floor(Math.random() * count) } }));
  const controls = h("div", { class: "hidden" }, ...placementSliders(ctx, "secondPlacement", ["right", "down", "rotation"], "second-"), h("div", { class: "row" }, other));
  const sync = () => {
    const { second } = ctx.state.get();
    toggle.textContent = second ? "Remove the second image" : "Add a second image";
    controls.classList.toggle("hidden", !second);
  };
  ctx.state.subscribe(sync);
  sync();
  if (!count) return h("details", { class: "group" }, h("summary", {}, "Overlap"), h("p", { class: "reason" }, "A second image needs test images."));
  return h("details", { class: "group", open: Boolean(ctx.state.get().second) }, h("summary", {}, "Overlap"), toggle, controls);
}

function createAttack(ctx) {
  const set = (changes) => {
    const attack = { method: "fgsm", eps: 0.1, steps: 10, ...ctx.state.get().attack, ...changes };
    ctx.state.set({ attack: attack.method === "none" ? null : attack });
  };
  const method = select("Method", [["none", "none"], ["fgsm", "FGSM"], ["pgd", "PGD"]], ctx.state.get().attack?.method ?? "none", (value) => set({ method: value }), "attack");
  const eps = slider("eps", { min: 0, max: 0.4, step: 0.01, value: ctx.state.get().attack?.eps ?? 0.1, id: "eps", change: (value) => ctx.state.get().attack && set({ eps: value }) });
  const shown = h("div", { class: "perturbation" });
  ctx.onResults(() => {
    const { attack } = ctx.state.get();
    method.input.value = attack?.method ?? "none";
    if (attack) eps.set(attack.eps);
    const { image, clean } = ctx.results[0];
    shown.replaceChildren(...(clean ? perturbation(decodeArray(image), decodeArray(clean)) : []));
  });
  return h("details", { class: "group", open: Boolean(ctx.state.get().attack) }, h("summary", {}, "Attack"), h("div", { class: "row" }, method), eps, shown);
}

/** Return the change of the pixels, averaged over the channels, with its largest value. */
function perturbation(image, clean) {
  const [channels, height, width] = image.shape;
  const plane = height * width;
  const change = Array.from({ length: plane }, (_, i) => {
    let sum = 0;
    for (let c = 0; c < channels; c += 1) sum += image.data[c * plane + i] - clean.data[c * plane + i];
    return sum / channels;
  });
  const largest = Math.max(...change.map(Math.abs), 1e-9);
  const svg = s("svg", { viewBox: "0 0 100 100", role: "img", "aria-label": `Perturbation, at most ${format(largest)}` },
    pixelImage(height, width, [0, 0, 100, 100], (i) => colorAt(MAPS.puor, 0.5 + change[i] / (2 * largest))));
  return [svg, h("p", {}, `perturbation, at most ${format(largest)}`)];
}
