// The state in the part of the address after #, which is sent to no server.

export function toHash(state) {
  const fields = new URLSearchParams();
  fields.set("launch", state.launch);
  if (state.gpu) fields.set("gpu", state.gpu);
  if (state.gpus) fields.set("gpus", String(state.gpus));
  if (Object.keys(state.set).length) fields.set("set", JSON.stringify(state.set));
  if (state.unset.length) fields.set("unset", state.unset.join(" "));
  return `#${fields}`;
}

/** The state of an address; null without one. */
export function fromHash(hash) {
  const fields = new URLSearchParams(hash.replace(/^#/, ""));
  if (!fields.get("launch")) return null;
  let set = {};
  try {
    set = JSON.parse(fields.get("set") ?? "{}");
  } catch {
    set = "damaged"; // which the program refuses
  }
  return {
    launch: fields.get("launch"),
    gpu: fields.get("gpu") || null,
    gpus: fields.get("gpus") ? Number(fields.get("gpus")) : null,
    set,
    unset: (fields.get("unset") ?? "").split(" ").filter((flag) => flag),
  };
}
