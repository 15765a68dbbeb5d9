// The equations of the routing, with the numbers of this input for one parent.

import { decodeArray } from "./arrays.js";
import { drawing, format, h, s, select, text, withTip } from "./dom.js";
import { leadOf, parentState, shownIteration, shownLayer, shownParent } from "./couplings.js";
import { imageOf } from "./state.js";

export const equationPanel = {
  id: "equation",
  title: "Equation with numbers",
  about: "The routing's equations, and what this input puts into them for one parent: logits, couplings and votes of its strongest children, their sum, and the resulting pose.",
  needs: "capsules",
  wide: true,
  controls(ctx) {
    const lead = leadOf(ctx);
    const { layers, classes } = ctx.info.runs[lead];
    const parent = select("Parent", [], 0, (value) => ctx.state.set(parentState(shownLayer(ctx, lead), Number(value))), "parent");
    ctx.onResults(() => {
      const shown = shownLayer(ctx, lead);
      if (!shown || shown.layer.why) return;
      const names = Array.from({ length: shown.layer.parents }, (_, n) => (shown.last ? classes[n] : `type ${n}`));
      parent.input.replaceChildren(...names.map((name, n) => h("option", { value: n }, name)));
      parent.input.value = shownParent(ctx, lead, shown);
    });
    return layers.length ? [parent] : [];
  },
  async draw(ctx, run) {
    const shown = shownLayer(ctx, run);
    if (!shown || shown.layer.why) return h("p", { class: "reason" }, shown?.layer.why ?? "No capsule layers.");
    const info = ctx.info.runs[run].layers[shown.index];
    const state = ctx.state.get();
    const t = shownIteration(ctx, shown.layer);
    const parent = shownParent(ctx, run, shown);
    const root = h("div", { class: "split" });
    const left = h("div", {},
      h("p", { class: "source" }, `${info.routing} · ${info.paper}, ${info.equation_number}`),
      h("pre", { class: "equation" }, info.equation.map(line)));
    root.append(left);
    let numbers;
    try {
      numbers = await ctx.backend.parent({
        run, image: imageOf(state), layer: shown.index, site: shown.layer.site.length ? shown.layer.site : null,
        parent, iteration: t, iterations: state.iterations,
      });
    } catch (error) {
      left.append(h("p", { class: "reason" }, error.message));
      return root;
    }
    ctx.parents[run] = { layer: info.name, parent, iteration: t, ...numbers };
    const name = shown.last ? ctx.info.runs[run].classes[parent] : `type ${parent}`;
    left.append(
      h("p", { class: "numbers" },
        `Σ couplings = ${format(numbers.coupling_sum)}, |Σ c v| = ${format(numbers.sum_length)}, |pose| = ${format(numbers.pose_length)}`,
        numbers.activation === null ? "" : `, activation = ${format(numbers.activation)}`),
      vector("Σ c v", decodeArray(numbers.sum).data), vector("pose", decodeArray(numbers.pose).data));
    root.append(h("div", {},
      h("p", {}, `Parent ${name}, iteration ${t + 1}: its ${numbers.children.length} largest couplings of ${numbers.n_children}`),
      table(shown.layer, numbers)));
    return root;
  },
  data: (ctx, run) => {
    const numbers = ctx.parents[run];
    return numbers && { ...numbers, sum: [...decodeArray(numbers.sum).data], pose: [...decodeArray(numbers.pose).data] };
  },
};

/** Return a line of an equation; what stands after a wide gap is a comment. */
function line(content) {
  const [equation, comment] = content.split(/ {3,}(?!=)/);
  return h("span", { class: "line-of" }, equation, comment ? h("span", { class: "remark" }, `   ${comment}`) : null, "\n");
}

function table(layer, numbers) {
  const position = (child) => {
    if (!layer.grid || layer.by_type) return `type ${child}`;
    const cell = Math.floor(child / layer.types);
    return `row ${Math.floor(cell / layer.grid[1])}, column ${cell % layer.grid[1]}, type ${child % layer.types}`;
  };
  const rows = numbers.children.map((row) => h("tr", {},
    h("th", { scope: "row" }, position(row.child)), h("td", {}, format(row.logit)), h("td", {}, format(row.coupling, 4)),
    h("td", {}, format(row.vote_length)), h("td", {}, format(row.agreement))));
  return h("div", { class: "table" }, h("table", {},
    h("thead", {}, h("tr", {}, ["child", "logit", "coupling", "|vote|", "⟨vote, pose⟩"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows)));
}

/** Return the elements of a vector as bars. */
function vector(name, values) {
  const largest = Math.max(...[...values].map(Math.abs), 1e-9);
  const step = Math.min(22, 360 / values.length);
  const bars = [...values].map((value, n) => {
    const height = (24 * Math.abs(value)) / largest;
    const bar = s("rect", { x: 56 + n * step, y: value < 0 ? 28 : 28 - height, width: step - 2, height: Math.max(height, 0.5), class: value < 0 ? "value negative" : "value" });
    return withTip(bar, `element ${n}: ${format(value, 4)}`);
  });
  return drawing(420, 58, `${name}: ${[...values].map((value) => format(value, 2)).join(", ")}`, text(0, 32, name, { class: "name" }), bars,
    s("line", { class: "axis", x1: 54, x2: 56 + step * values.length, y1: 28, y2: 28 }));
}
