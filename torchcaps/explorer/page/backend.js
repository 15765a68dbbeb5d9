// Where results come from: the server, or the data inside of an exported file.

import { decodeArray, encodeFloats } from "./arrays.js";

/** Run an asynchronous function for the latest arguments only: calls during a run replace each other. */
export function coalesce(compute) {
  let running = false;
  let next = null;
  return async function run(...args) {
    if (running) {
      next = args;
      return;
    }
    running = true;
    try {
      await compute(...args);
    } finally {
      running = false;
      if (next) {
        const latest = next;
        next = null;
        run(...latest);
      }
    }
  };
}

const MAX_ATTEMPTS = 8;
const BUSY_MS = 200;

/** Results computed by `torchcaps explore`. */
export class ServerBackend {
  isFile = false;

  info = () => this.#get("api/info");
  training = (run) => this.#get(`api/training?run=${run}`);
  statistics = (run) => this.#get(`api/statistics?run=${run}`);
  forward = (request) => this.#post("api/forward", request);
  parent = (request) => this.#post("api/parent", request);
  credit = (request) => this.#post("api/credit", request);

  samples(query) {
    const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
    return this.#get(`api/samples?${new URLSearchParams(given)}`);
  }

  async decode(run, capsules, count, decoder) {
    const shape = [count, decoder.classes, decoder.dim];
    const reply = await this.#post("api/decode", { run, capsules: encodeFloats(capsules, shape) });
    return decodeArray(reply.images).data;
  }

  async upload(file) {
    const type = file.type.startsWith("image/") ? file.type : "application/octet-stream";
    return this.#read(await fetch("api/upload", { method: "POST", headers: { "Content-Type": type }, body: file }));
  }

  async #get(path) {
    return this.#read(await this.#fetch(path));
  }

  /** Fetch; if the server is busy with other requests, wait and try again. */
  async #fetch(path, options) {
    for (let attempt = 1; ; attempt += 1) {
      const response = await fetch(path, options);
      if (response.status !== 503 || attempt === MAX_ATTEMPTS) return response;
      await new Promise((resolve) => { setTimeout(resolve, BUSY_MS * attempt); });
    }
  }

  async #post(path, body) {
    const headers = { "Content-Type": "application/json" };
    return this.#read(await this.#fetch(path, { method: "POST", headers, body: JSON.stringify(body) }));
  }

  async #read(response) {
    const body = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
    if (!response.ok) throw new Error(body.error ?? `the server answered ${response.status}`);
    return body;
  }
}

/** Results stored in an exported file; the decoder runs in the page. */
export class FileBackend {
  isFile = true;

  constructor(data) {
    this.data = data;
    this.decoders = data.decoders.map((layers) =>
      layers?.map(({ weight, bias }) => ({ weight: decodeArray(weight), bias: decodeArray(bias) })),
    );
  }

  info = async () => this.data.info;
  training = async (run) => this.data.training[run];
  statistics = async (run) => this.data.statistics[run];
  parent = async ({ run, image, layer, parent, iteration }) => {
    const numbers = this.data.parents[run][this.#sample(image)][`${layer}-${parent}-${iteration}`];
    if (!numbers) throw new Error("This file contains the numbers of the predicted class only.");
    return numbers;
  };
  credit = async ({ run, image, target }) => {
    const sample = this.#sample(image);
    const credit = this.data.credit[run][sample]?.[target];
    if (!credit) throw new Error("This file contains the credit of the predicted class only.");
    return credit;
  };

  #sample(image) {
    return this.data.order.includes(image.source.sample) ? image.source.sample : this.data.order[0];
  }

  async forward({ run, image }) {
    return this.data.forward[run][this.#sample(image)];
  }

  async samples({ run, sort, true: label, predicted, offset = 0, limit = 24 }) {
    const all = this.data.samples[run].filter(
      (sample) =>
        (label == null || sample.labels.includes(label)) &&
        (predicted == null || sample.predicted.includes(predicted)),
    );
    if (sort !== "index") all.sort((a, b) => b[sort] - a[sort]);
    return { ready: true, total: all.length, samples: all.slice(offset, offset + limit) };
  }

  async decode(run, capsules, count) {
    return decode(this.decoders[run], capsules, count);
  }
}

/** Apply a decoder: linear layers with ReLU between them and a sigmoid at the end. */
export function decode(layers, input, count) {
  let values = Float32Array.from(input);
  layers.forEach(({ weight, bias }, n) => {
    const [outputs, inputs] = weight.shape;
    const result = new Float32Array(count * outputs);
    for (let row = 0; row < count; row += 1) {
      const active = [];
      for (let i = 0; i < inputs; i += 1) if (values[row * inputs + i] !== 0) active.push(i);
      for (let o = 0; o < outputs; o += 1) {
        let total = bias.data[o];
        for (const i of active) total += weight.data[o * inputs + i] * values[row * inputs + i];
        const last = n === layers.length - 1;
        result[row * outputs + o] = last ? 1 / (1 + Math.exp(-total)) : Math.max(0, total);
      }
    }
    values = result;
  });
  return values;
}
