// Drawing with mouse, finger or pen: strokes are kept as points, and rasterised to the network's pixels.

import { textOf } from "./arrays.js";

const SCALE = 10; // canvas pixels per pixel of the network
const BOX = 20 / 28; // MNIST: digits fit into 20x20 of 28x28 pixels, centred by mass

export class Sketch {
  /** canvas: the surface; shape: [channels, height, width]; changed: called with the base64 of the pixels. */
  constructor(canvas, shape, changed) {
    this.canvas = canvas;
    this.shape = shape;
    this.changed = changed;
    this.strokes = [];
    this.color = "#ffffff";
    this.centred = shape[0] === 1;
    this.enabled = false;
    canvas.addEventListener("pointerdown", (event) => this.#start(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { this.active = false; });
  }

  clear() {
    this.strokes = [];
    this.#report();
  }

  undo() {
    this.strokes.pop();
    this.#report();
  }

  /** Replace the strokes: lists of [x, y] in 0..1. */
  load(strokes) {
    this.strokes = strokes.map((points) => ({ color: this.color, points }));
    this.#report();
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  #start(event) {
    if (!this.enabled || event.button > 0) return;
    event.preventDefault();
    this.canvas.setPointerCapture(event.pointerId);
    this.active = true;
    this.strokes.push({ color: this.color, points: [this.#point(event)] });
    this.#report();
  }

  #move(event) {
    if (!this.active) return;
    event.preventDefault();
    const events = event.getCoalescedEvents?.() ?? [];
    for (const item of events.length ? events : [event]) this.strokes.at(-1).points.push(this.#point(item));
    this.#report();
  }

  #report() {
    if (!this.strokes.length) {
      this.changed(textOf(new Uint8Array(this.shape.reduce((a, b) => a * b))));
      return;
    }
    this.changed(this.pixels());
  }

  /** Return the base64 of the bytes [C, H, W]. */
  pixels() {
    const [channels, height, width] = this.shape;
    const large = this.#render(this.#fit());
    const bytes = new Uint8Array(channels * height * width);
    for (let y = 0; y < height; y += 1) {
      for (let x = 0; x < width; x += 1) {
        const sums = [0, 0, 0];
        for (let dy = 0; dy < SCALE; dy += 1) {
          for (let dx = 0; dx < SCALE; dx += 1) {
            const start = 4 * ((y * SCALE + dy) * width * SCALE + x * SCALE + dx);
            for (let c = 0; c < 3; c += 1) sums[c] += large[start + c];
          }
        }
        for (let c = 0; c < channels; c += 1) {
          const sum = channels === 3 ? sums[c] : (sums[0] + sums[1] + sums[2]) / 3;
          bytes[(c * height + y) * width + x] = Math.round(sum / SCALE ** 2);
        }
      }
    }
    return textOf(bytes);
  }

  /** Return a function from points in 0..1 to canvas pixels: as drawn, or centred as in MNIST. */
  #fit() {
    const [, height, width] = this.shape;
    const plain = ([x, y]) => [x * width * SCALE, y * height * SCALE];
    if (!this.centred) return plain;
    const points = this.strokes.flatMap((stroke) => stroke.points).map(plain);
    const xs = points.map(([x]) => x);
    const ys = points.map(([, y]) => y);
    const brush = this.#brush();
    const side = Math.max(Math.max(...xs) - Math.min(...xs), Math.max(...ys) - Math.min(...ys)) + brush;
    const factor = points.length > 1 ? Math.min(3, (BOX * Math.min(height, width) * SCALE) / side) : 1;
    const middle = [(Math.min(...xs) + Math.max(...xs)) / 2, (Math.min(...ys) + Math.max(...ys)) / 2];
    const scaled = (point) => plain(point).map((value, axis) => (value - middle[axis]) * factor + (axis ? height : width) * SCALE / 2);
    const mass = this.#mass(this.#render(scaled));
    return (point) => scaled(point).map((value, axis) => value + (axis ? height : width) * SCALE / 2 - mass[axis]);
  }

  #brush() {
    return 0.09 * Math.min(this.shape[1], this.shape[2]) * SCALE;
  }

  #mass(pixels) {
    const [, height, width] = this.shape;
    let total = 0;
    const sums = [0, 0];
    for (let y = 0; y < height * SCALE; y += 1) {
      for (let x = 0; x < width * SCALE; x += 1) {
        const value = pixels[4 * (y * width * SCALE + x)];
        total += value;
        sums[0] += value * x;
        sums[1] += value * y;
      }
    }
    return total ? sums.map((sum) => sum / total) : [(width * SCALE) / 2, (height * SCALE) / 2];
  }

  #render(map) {
    const [, height, width] = this.shape;
    const canvas = document.createElement("canvas");
    canvas.width = width * SCALE;
    canvas.height = height * SCALE;
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.fillStyle = "#000000";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.lineCap = "round";
    context.lineJoin = "round";
    context.lineWidth = this.#brush();
    for (const { color, points } of this.strokes) {
      context.strokeStyle = color;
      context.beginPath();
      points.map(map).forEach(([x, y], n) => (n ? context.lineTo(x, y) : context.moveTo(x, y)));
      if (points.length === 1) context.lineTo(map(points[0])[0] + 0.1, map(points[0])[1]);
      context.stroke();
    }
    return context.getImageData(0, 0, canvas.width, canvas.height).data;
  }
}
