// A name or a bar leads to its part and opens it; a field searches.
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
lead();
