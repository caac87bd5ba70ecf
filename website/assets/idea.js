// The figure of "The idea". A logit is at most ||q|| ||k||: the area of a rectangle. One step makes both sides longer,
// and the area that is added is the bound on the change of the logit: formula (3) of the theory for the path q k.
const SVG = "http://www.w3.org/2000/svg";
const UNIT = 30; // pixels for a norm of 1

/** The bound for weights with norms q and k that were 1 at the start, and a plain step of norm `step`. */
function change(q, k, step, quack) {
  const rate = { q: quack ? 1 / k : 1, k: quack ? 1 / q : 1 }; // tau = 1; sensitivities are k and q, and were 1
  const dq = step * rate.q, dk = step * rate.k;
  return { rate, dq, dk, area: (q + dq) * (k + dk) - q * k };
}

function rectangle(svg, kind, x, y, width, height) {
  const classes = `.${kind.replace(" ", ".")}`;
  const found = svg.querySelector(classes) ?? svg.appendChild(document.createElementNS(SVG, "rect"));
  found.setAttribute("class", kind);
  for (const [name, value] of Object.entries({ x, y, width, height })) found.setAttribute(name, value);
}

function draw(panel, q, k, now, widest) {
  const svg = panel.querySelector("svg"), bottom = 165, left = 4;
  const [width, height] = [k * UNIT, q * UNIT];
  rectangle(svg, "logit", left, bottom - height, width, height);
  rectangle(svg, "added top", left, bottom - height - now.dq * UNIT, width, now.dq * UNIT);
  rectangle(svg, "added side", left + width, bottom - height - now.dq * UNIT, now.dk * UNIT, height + now.dq * UNIT);
  panel.querySelector(".bar").style.inlineSize = `${(100 * now.area) / widest}%`;
  panel.querySelector(".change").textContent = now.area.toFixed(2);
  panel.querySelector(".rate-q").textContent = now.rate.q.toFixed(2);
  panel.querySelector(".rate-k").textContent = now.rate.k.toFixed(2);
}

function start(figure) {
  const input = (name) => figure.querySelector(`input[name=${name}]`);
  const show = () => {
    const [k, q, step] = ["k", "q", "step"].map((name) => Number(input(name).value));
    const widest = change(Number(input("q").max), Number(input("k").max), step, false).area;
    for (const [name, value] of Object.entries({ k, q, step })) {
      figure.querySelector(`output[name=${name}]`).textContent = name === "step" ? value.toFixed(2) : `${value.toFixed(1)} x`;
    }
    for (const panel of figure.querySelectorAll(".panel")) {
      draw(panel, q, k, change(q, k, step, panel.classList.contains("quack")), widest);
    }
  };
  figure.addEventListener("input", show);
  figure.querySelector("button").addEventListener("click", () => grow(input, show));
  show();
}

/** Let both norms grow, as in a training that gets unstable. */
function grow(input, show) {
  const began = performance.now(), seconds = 4;
  const frame = (time) => {
    const part = Math.min(1, Math.max(0, (time - began) / 1000 / seconds));
    for (const name of ["k", "q"]) input(name).value = 1 + part * (Number(input(name).max) - 1);
    show();
    if (part < 1) requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}

document.querySelectorAll("figure.idea").forEach(start);
