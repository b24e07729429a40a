"use strict";
// Hovering: a crosshair with the nearest step's numbers on curves, the title of a box on bars and timelines. The page reads without it.
const tip = document.getElementById("tip");
const NS = document.querySelector("svg") && document.querySelector("svg").namespaceURI;

function place(event) {
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4)) + "px";
  tip.style.visibility = "visible";
}

function hide() { tip.style.visibility = "hidden"; }

for (const title of document.querySelectorAll("svg rect > title")) {
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}
document.addEventListener("mousemove", (event) => {
  const box = event.target.closest && event.target.closest("[data-tip]");
  if (box) { tip.textContent = box.dataset.tip; place(event); }
});
document.addEventListener("mouseout", (event) => { if (event.target.dataset && event.target.dataset.tip) hide(); });

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const curves = JSON.parse(svg.dataset.hover);
  const cross = svg.querySelector(".cross");
  const dots = curves.map((curve) => {
    const dot = document.createElementNS(NS, "circle");
    dot.setAttribute("class", "dot"); dot.setAttribute("r", 3.5); dot.setAttribute("visibility", "hidden");
    dot.style.fill = curve.color;
    return svg.appendChild(dot);
  });
  svg.addEventListener("mousemove", (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const all = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
    const x = all[nearest(all, point.x)];
    tip.textContent = "";
    let step = null;
    curves.forEach((curve, index) => {
      const i = nearest(curve.x, x);
      const here = Math.abs(curve.x[i] - x) < 1;
      dots[index].setAttribute("visibility", here ? "visible" : "hidden");
      if (!here) return;
      dots[index].setAttribute("cx", curve.x[i]); dots[index].setAttribute("cy", curve.y[i]);
      if (step === null) { step = curve.step[i]; tip.append("step " + step); }
      const swatch = document.createElement("span");
      swatch.className = "swatch"; swatch.style.background = curve.color;
      tip.append("\n", swatch, curve.name + "  " + curve.text[i]);
    });
    cross.setAttribute("x1", x); cross.setAttribute("x2", x); cross.setAttribute("visibility", "visible");
    place(event);
  });
  svg.addEventListener("mouseleave", () => {
    hide(); cross.setAttribute("visibility", "hidden");
    dots.forEach((dot) => dot.setAttribute("visibility", "hidden"));
  });
}
