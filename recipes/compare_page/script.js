"use strict";
// Draws the charts again at the width of the screen, from all points; shows values under the pointer; zooms and hides.
(() => {
  const { charts, xs } = JSON.parse(document.getElementById("data").textContent);
  const steps = charts.flatMap((chart) => chart.curves.flatMap((curve) => [xs[curve.x][0], xs[curve.x].at(-1)]));
  const whole = [Math.min(...steps), Math.max(...steps)];
  const output = document.querySelector("nav output");
  const state = { range: whole, at: null };

  const finite = (value) => value !== null;
  const indexAt = (x, step) => {
    let low = 0, high = x.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] <= step) low = middle; else high = middle;
    }
    return step - x[low] <= x[high] - step ? low : high;
  };

  function ticks(low, high, count) {
    if (!(high > low)) return [low];
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const width = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
    const first = Math.ceil(low / width - 1e-9), last = Math.floor(high / width + 1e-9);
    return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * width);
  }

  // The same rule as value_range in compare_charts.py, over the steps that are shown.
  function valueRange(chart) {
    const ends = chart.base === null ? [] : [chart.base];
    for (const curve of chart.curves) {
      if (curve.hidden) continue;
      const x = xs[curve.x];
      const seen = curve.y.filter((y, i) => finite(y) && x[i] >= state.range[0] && x[i] <= state.range[1]);
      if (!seen.length) continue;
      seen.sort((a, b) => a - b);
      const cut = curve.kind === "dots" ? Math.floor(seen.length / 10) : 0;
      const high = seen[seen.length - 1 - cut];
      ends.push(curve.kind === "band" || curve.kind === "guide" ? -high : seen[cut], high);
    }
    if (!ends.length) return [0, 1];
    const low = Math.min(...ends), high = Math.max(...ends);
    const room = 0.06 * (high - low) || 1e-6 + 0.01 * Math.abs(high);
    return [low - room, high + room];
  }

  function frameOf(chart) {
    const width = chart.svg.clientWidth || 760, height = width < 520 ? 230 : 300;
    const [first, last] = state.range, [low, high] = valueRange(chart);
    const box = { left: 58, right: width - 24, top: 12, bottom: height - 28 };
    const x = (step) => box.left + ((step - first) / (last - first || 1)) * (box.right - box.left);
    const y = (value) => box.top + ((high - value) / (high - low)) * (box.bottom - box.top);
    const step = (px) => first + ((px - box.left) / (box.right - box.left)) * (last - first);
    return { width, height, low, high, x, y, step, ...box };
  }

  function grid(chart, f) {
    const rows = ticks(f.low, f.high, f.height < 260 ? 4 : 5), parts = [];
    const places = rows.length > 1 ? Math.max(0, -Math.floor(Math.log10(rows[1] - rows[0]) + 1e-9)) : 3;
    for (const value of rows) {
      const y = f.y(value).toFixed(1), base = chart.base !== null && Math.abs(value - chart.base) < 1e-12;
      parts.push(`<line${base ? ' class="base"' : ""} x1="${f.left}" x2="${f.right}" y1="${y}" y2="${y}"/>`,
        `<text x="${f.left - 8}" y="${+y + 4}" text-anchor="end">${value.toFixed(places)}</text>`);
    }
    for (const step of ticks(...state.range, Math.max(2, Math.round(f.width / 130)))) {
      if (Number.isInteger(step)) {
        parts.push(`<text x="${f.x(step).toFixed(1)}" y="${f.height - 8}" text-anchor="middle">${step.toLocaleString("en")}</text>`);
      }
    }
    parts.push(`<text x="${f.left - 8}" y="${f.height - 8}" text-anchor="end">step</text>`);
    return `<g class="grid">${parts.join("")}</g>`;
  }

  function draw(curve, f) {
    const x = xs[curve.x], marks = `c${curve.run} ${curve.kind}`;
    const from = Math.max(0, indexAt(x, state.range[0]) - 1), to = Math.min(x.length, indexAt(x, state.range[1]) + 2);
    const at = [];
    for (let i = from; i < to; i++) at.push([f.x(x[i]).toFixed(1), finite(curve.y[i]) ? curve.y[i] : null]);
    const point = (px, value) => `${px} ${f.y(value).toFixed(1)}`;
    const seen = at.filter(([, value]) => value !== null);
    if (!seen.length) return "";
    switch (curve.kind) {
      case "band":
        return `<path class="${marks}" d="M${seen.map(([px, v]) => point(px, v)).join("L")}L${
          seen.reverse().map(([px, v]) => point(px, -v)).join("L")}z"/>`;
      case "guide":
        return [1, -1].map((sign) => f.y(sign * curve.y[0]).toFixed(1)).map(
          (y) => `<line class="${marks}" x1="${f.left}" x2="${f.right}" y1="${y}" y2="${y}"/>`).join("");
      case "points":
        return seen.map(([px, v]) => `<path class="${marks}" d="M${px} ${(f.y(v) - 5).toFixed(1)}l5 5l-5 5l-5 -5z"/>`).join("");
      case "dots":
      case "rings": {
        const few = curve.kind === "dots" && seen.length < 400;
        const radius = curve.kind === "rings" ? 5 : few ? 2.4 : f.width < 520 ? 1 : 1.6;
        return seen.map(([px, v]) =>
          `<circle class="${marks}${few ? " few" : ""}" cx="${px}" cy="${f.y(v).toFixed(1)}" r="${radius}"/>`).join("");
      }
      default: {
        let pen = "M"; // a nan or inf leaves a hole
        const path = at.map(([px, v]) => { const out = v === null ? "" : pen + point(px, v); pen = v === null ? "M" : "L"; return out; });
        return `<path class="${marks}" d="${path.join("")}"/>`;
      }
    }
  }

  function render(chart) {
    const f = (chart.frame = frameOf(chart)), id = `clip-${chart.key}`;
    chart.svg.setAttribute("viewBox", `0 0 ${f.width} ${f.height}`);
    const clip = `<clipPath id="${id}"><rect x="${f.left - 6}" y="${f.top}" width="${f.right - f.left + 12}" height="${f.bottom - f.top}"/></clipPath>`;
    const curves = chart.curves.filter((curve) => !curve.hidden).map((curve) => draw(curve, f)).join("");
    chart.svg.innerHTML = `${clip}${grid(chart, f)}<g clip-path="url(#${id})">${curves}</g>` +
      `<rect class="chosen" y="${f.top}" height="${f.bottom - f.top}" width="0"/><line class="cursor" y1="${f.top}" y2="${f.bottom}" visibility="hidden"/>`;
  }

  function point(step) {
    state.at = step;
    const said = charts[0].nearest(step === null ? state.range[1] : step); // without a pointer: the last values
    const [first, last] = state.range.map((s) => s.toLocaleString("en"));
    output.textContent = `steps ${first} to ${last}, values at ${said.toLocaleString("en")}`;
    for (const chart of charts) {
      const line = chart.svg.querySelector(".cursor");
      line.setAttribute("visibility", step === null ? "hidden" : "visible");
      for (const end of ["x1", "x2"]) line.setAttribute(end, chart.frame.x(said).toFixed(1));
      for (const curve of chart.curves) {
        const value = curve.y[indexAt(xs[curve.x], said)]; // of marks, which stand far apart, the nearest
        const sign = curve.kind === "band" || curve.kind === "guide" ? "±" : chart.base === 0 && value > 0 ? "+" : "";
        curve.shown.textContent = value === null ? "–" : sign + value.toFixed(chart.base === 1 ? 4 : 5);
      }
    }
  }

  function zoom(range) {
    const [low, high] = [Math.max(whole[0], Math.min(...range)), Math.min(whole[1], Math.max(...range))];
    state.range = high - low >= 2 ? [Math.round(low), Math.round(high)] : whole;
    charts.forEach(render);
    point(null);
    for (const button of document.querySelectorAll("nav button")) {
      button.setAttribute("aria-pressed", String(lastPart(button).every((end, i) => end === state.range[i])));
    }
  }

  const lastPart = (button) => {
    const share = +button.dataset.last;
    return [share === 1 ? whole[0] : Math.round(whole[1] - share * (whole[1] - whole[0])), whole[1]];
  };

  function listen(chart) {
    const { svg } = chart;
    const stepAt = (event) => chart.frame.step(event.clientX - svg.getBoundingClientRect().left);
    let start = null;
    svg.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse" && event.button === 0) start = stepAt(event); else point(stepAt(event)); });
    svg.addEventListener("pointermove", (event) => {
      const now = stepAt(event), chosen = svg.querySelector(".chosen");
      point(now);
      if (start === null) return;
      const [a, b] = [chart.frame.x(Math.min(start, now)), chart.frame.x(Math.max(start, now))];
      chosen.setAttribute("x", a); chosen.setAttribute("width", b - a);
    });
    addEventListener("pointerup", (event) => {
      if (start === null) return;
      const now = stepAt(event), far = Math.abs(chart.frame.x(now) - chart.frame.x(start)) > 8, from = start;
      start = null;
      if (far) zoom([from, now]);
    });
    svg.addEventListener("pointerleave", () => { if (start === null) point(null); });
    svg.addEventListener("dblclick", () => zoom(whole));
    svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") zoom(whole);
      if (!move) return;
      event.preventDefault();
      const x = charts[0].axis, i = state.at === null ? x.length - 1 : indexAt(x, state.at) + move;
      point(x[Math.max(0, Math.min(x.length - 1, i))]);
    });
  }

  for (const chart of charts) {
    const figure = document.getElementById(`chart-${chart.key}`);
    chart.svg = figure.querySelector(".plot");
    chart.axis = xs[(chart.curves.find((curve) => curve.kind === "broad" || curve.kind === "line") || chart.curves[0]).x];
    chart.nearest = (step) => chart.axis[indexAt(chart.axis, step)];
    figure.querySelectorAll(".legend button").forEach((button) => {
      const curve = chart.curves[+button.dataset.curve];
      curve.shown = button.querySelector("b");
      button.addEventListener("click", () => {
        curve.hidden = !curve.hidden;
        button.setAttribute("aria-pressed", String(!curve.hidden));
        render(chart);
        point(null);
      });
    });
    listen(chart);
  }
  document.querySelector("nav").hidden = false;
  document.querySelectorAll("nav button").forEach((button) => button.addEventListener("click", () => zoom(lastPart(button))));
  new ResizeObserver(() => { charts.forEach(render); point(state.at); }).observe(document.querySelector("main"));
  zoom(whole);
})();
