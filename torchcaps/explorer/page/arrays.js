// Tensors of the API: {shape, dtype, data}, data being base64 of little-endian values.

const READERS = {
  float32: (buffer) => new Float32Array(buffer),
  uint8: (buffer) => new Uint8Array(buffer),
  int32: (buffer) => new Int32Array(buffer),
  float16: (buffer) => halfToFloat(new Uint16Array(buffer)),
};

/** Return {shape, data} with a typed array; null stays null. */
export function decodeArray(array) {
  if (!array) return null;
  return { shape: array.shape, data: READERS[array.dtype](bytesOf(array.data).buffer) };
}

/** Return the API's form of 32-bit floats. */
export function encodeFloats(data, shape) {
  const values = Float32Array.from(data);
  return { shape, dtype: "float32", data: textOf(new Uint8Array(values.buffer)) };
}

/** Return the bytes of a base64 text. */
export function bytesOf(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** Return bytes as base64. */
export function textOf(bytes) {
  let binary = "";
  for (let i = 0; i < bytes.length; i += 1) binary += String.fromCharCode(bytes[i]);
  return btoa(binary);
}

/** Convert IEEE half-precision numbers to 32-bit floats. */
export function halfToFloat(halves) {
  const floats = new Float32Array(halves.length);
  for (let i = 0; i < halves.length; i += 1) {
    const half = halves[i];
    const sign = half & 0x8000 ? -1 : 1;
    const exponent = (half >> 10) & 0x1f;
    const fraction = half & 0x3ff;
    if (exponent === 0) floats[i] = sign * fraction * 2 ** -24;
    else if (exponent === 31) floats[i] = fraction ? NaN : sign * Infinity;
    else floats[i] = sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }
  return floats;
}

/** Return the Euclidean length of a slice. */
export function norm(data, start = 0, length = data.length) {
  let total = 0;
  for (let i = start; i < start + length; i += 1) total += data[i] * data[i];
  return Math.sqrt(total);
}
