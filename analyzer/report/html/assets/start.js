"use strict";
// Decompresses the report and the scripts of the page, and runs the scripts.
(async () => {
  async function text(id) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (each) => each.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }
  if (typeof DecompressionStream === "undefined") {
    document.getElementById("failure").hidden = false;
    return;
  }
  const [reports, extra, ...scripts] = await Promise.all(["reports", "extra", "library", "script"].map(text));
  for (const [id, content] of [["reports", reports], ["extra", extra]]) {
    const place = document.getElementById(id);
    place.type = "application/json";
    place.textContent = content;
  }
  for (const content of scripts) {
    const script = document.createElement("script");
    script.textContent = content;
    document.body.append(script);
  }
})();
