// What a page does: a layer's name leads to its part and opens it, a field searches, Plotly draws the charts.
"use strict";
function lead() {
  const found = document.getElementById(location.hash.slice(1));
  if (!found) return;
  found.hidden = false;
  found.open = true;
  found.querySelector("summary").focus({ preventScroll: true });
  found.scrollIntoView({ block: "start" });
}
addEventListener("hashchange", lead);
addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (link && link.hash === location.hash) lead(); // the same one once more
});
for (const field of document.querySelectorAll("input[type=search]")) {
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase();
    for (const row of field.closest("section").querySelectorAll(".folds > details, :scope > .table tbody tr")) {
      row.hidden = !(row.querySelector("summary") || row).textContent.toLowerCase().includes(words);
    }
  });
}
async function draw() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const script = document.createElement("script");
  script.textContent = await new Response(
    new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(script);
  const places = [...document.querySelectorAll(".chart")];
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const config = { responsive: true, displayModeBar: false };
  for (const [number, place] of places.entries()) {
    await Plotly.newPlot(place, charts[number].data, charts[number].layout, config);
    place.on("plotly_click", (event) => {
      const layer = event.points[0].customdata;
      if (!layer) return;
      location.hash = layer;
      lead();
    });
  }
  const resize = (width) => places.forEach((place) => Plotly.relayout(place, { width }));
  addEventListener("beforeprint", () => resize(680));
  addEventListener("afterprint", () => { resize(undefined); places.forEach((place) => Plotly.Plots.resize(place)); });
  document.body.dataset.drawn = places.length;
}
draw();
lead();
