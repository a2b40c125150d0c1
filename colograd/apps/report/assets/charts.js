// Curves over steps (uPlot), of one run or several over each other.

const live = new Set(); // the charts on the page

function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, known = 0; // an exponential mean without the bias towards its start
  return values.map((value) => {
    if (!isNumber(value)) return null;
    mean = weight * mean + (1 - weight) * value;
    known = weight * known + (1 - weight);
    return mean / known;
  });
}

// parts: [{label, steps, values, colour, dash, fill: [low, high], points, smooth}]
function curves(title, help, parts, options = {}) {
  const box = el("div.plot", { role: "img", "aria-label": `${title}: ${parts.map((part) => `${part.label} ${measured(lastOf(part.values), options.unit)}`).join(", ")} at the end` });
  const found = card(options.unit ? [title, el("span.hint", {}, `, ${options.unit}`)] : title, help, box);
  const chart = { box, parts, options, plot: null, marker: null, seen: false, stale: true };
  // Drawn when it is scrolled into view: a moved slider draws what somebody sees.
  chart.draw = () => {
    chart.stale = !chart.seen;
    if (chart.seen) drawCurves(chart);
  };
  chart.mark = () => placeMarker(chart);
  live.add(chart);
  box.seen = (seen) => {
    chart.seen = seen;
    if (seen && chart.stale) chart.draw();
  };
  sight.observe(box);
  watchWidth(box, () => (chart.plot ? chart.plot.setSize(sizeOf(box)) : chart.draw()));
  found.chart = chart;
  return found;
}

const sight = new IntersectionObserver((entries) => entries.forEach((entry) => entry.target.seen(entry.isIntersecting)), { rootMargin: "150px" });

const sizeOf = (box) => ({ width: box.clientWidth, height: 190 });

function aligned(parts) {
  const steps = [...new Set(parts.flatMap((part) => part.steps))].sort((a, b) => a - b);
  const spread = (part, values) => {
    if (part.steps.length === steps.length) return values;
    const known = new Map(part.steps.map((step, place) => [step, values[place]]));
    return steps.map((step) => (known.has(step) ? known.get(step) : undefined)); // undefined: not this series' step
  };
  return { steps, spread };
}

function drawCurves(chart) {
  const { box, parts } = chart;
  if (chart.plot) chart.plot.destroy();
  box.replaceChildren();
  if (!box.clientWidth) return;
  const { steps, spread } = aligned(parts);
  const data = [steps], series = [{ label: "step" }], bands = [];
  const weight = state.smoothing;
  for (const part of parts) {
    const smooth = weight && part.smooth !== false;
    if (part.fill && !smooth) {
      const [low, high] = part.fill.map((values) => spread(part, values));
      const edge = (label) => ({ label, stroke: "transparent", points: { show: false }, show: true, class: "edge" });
      data.push(low, high);
      series.push(edge("low"), edge("high"));
      bands.push({ series: [series.length - 1, series.length - 2], fill: part.colour + "26" });
    }
    if (smooth) {
      data.push(spread(part, part.values));
      series.push({ label: "raw", stroke: part.colour + "40", width: 1, points: { show: false }, class: "edge", spanGaps: true });
    }
    data.push(spread(part, smooth ? smoothed(part.values, weight) : part.values));
    series.push({
      label: visible(part.label),
      stroke: part.colour,
      width: 1.75,
      dash: part.dash,
      spanGaps: true,
      points: part.points ? { show: true, size: 6, fill: part.colour } : steps.length < 40 ? { show: true, size: 4 } : { show: false },
      value: (plot, value, place, at) => measured(at === null || at === undefined ? lastOf(plot.data[place]) : value, chart.options.unit), // where nobody points: the last
    });
  }
  const axis = { stroke: css("--muted"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  chart.plot = new uPlot(
    {
      ...sizeOf(box),
      padding: [6, 10, 0, 0],
      series,
      bands,
      scales: { x: { time: false }, y: { range: chart.options.range || within } },
      axes: [
        { ...axis, size: 26, gap: 4, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000] },
        { ...axis, size: 46, gap: 4, values: (_, splits) => splits.map((value) => (chart.options.unit === "%" ? percent(value) : fmt(value, 4))) },
      ],
      cursor: { sync: { key: "steps", setSeries: false }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
      legend: { live: true, markers: { width: () => 0, fill: (plot, place) => plot.series[place].stroke(plot, place) } },
      hooks: { ready: [(plot) => opensSteps(plot)], setScale: [() => placeMarker(chart)], setSize: [() => placeMarker(chart)] },
    },
    data,
    box,
  );
  placeMarker(chart);
}

function within(plot, low, high) {
  if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  const room = high - low || Math.abs(high) || 1;
  const down = low >= 0 && low <= 0.35 * high ? 0 : low - 0.06 * room;
  return [down, high + 0.06 * room];
}

function opensSteps(plot) {
  let from = 0;
  plot.over.addEventListener("mousedown", (event) => (from = event.clientX));
  plot.over.addEventListener("click", (event) => {
    if (Math.abs(event.clientX - from) < 4 && plot.cursor.idx !== null && plot.cursor.idx !== undefined) change({ step: plot.data[0][plot.cursor.idx] });
  });
}

// The opened step is a line over the chart: drawing it needs no drawing of curves.
function placeMarker(chart) {
  const plot = chart.plot;
  if (!plot || !plot.over) return;
  if (!chart.marker || chart.marker.parentNode !== plot.over) {
    chart.marker = el("div.marker");
    plot.over.append(chart.marker);
  }
  const { min, max } = plot.scales.x;
  const shown = state.step !== null && isNumber(min) && state.step >= min && state.step <= max;
  chart.marker.hidden = !shown;
  if (shown) chart.marker.style.transform = `translateX(${Math.round(plot.valToPos(state.step, "x"))}px)`;
}

function forgetCharts() {
  for (const chart of live) {
    sight.unobserve(chart.box);
    if (chart.plot) chart.plot.destroy();
  }
  live.clear();
}

// The parts of a chart: names of metrics, of all runs. With several runs colour tells the run, the dash the metric.
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3], [1, 5]];

function partsOf(named, from = (run) => run) {
  const found = [];
  for (const run of runs) {
    const source = from(run);
    named.forEach(([name, label, extra], place) => {
      const values = Object.hasOwn(source.columns, name) ? source.columns[name] : null;
      if (!values || !values.some(isNumber)) return;
      const more = typeof extra === "function" ? extra(source) : extra;
      found.push({
        label: several() ? `${run.name} · ${label}` : label,
        steps: source.steps,
        values,
        colour: several() ? runColour(run.index) : seriesColour(place),
        dash: several() ? DASHES[place % DASHES.length] : undefined,
        ...more,
        ...(several() ? { fill: undefined } : {}),
      });
    });
  }
  return found;
}
