// Overview: what was learned, and how healthy the learning was.

// The least and the greatest reward that a completion had, of one function or (null) of their sum.
function observed(run, functionName) {
  let low = Infinity, high = -Infinity;
  for (const spread of Object.values(run.spreads || {})) {
    const limits = functionName === null ? limitsOf(spread.rewards) : spread.functions && spread.functions[functionName];
    if (limits) [low, high] = [Math.min(low, limits[0]), Math.max(high, limits[1])];
  }
  return low <= high ? [low, high] : [-Infinity, Infinity];
}

// A histogram of one value has one bin, half a unit to each side of it.
function limitsOf(histogram) {
  if (!histogram) return null;
  const { edges } = histogram, last = edges[edges.length - 1];
  return edges.length === 2 ? [(edges[0] + last) / 2, (edges[0] + last) / 2] : [edges[0], last];
}

// One standard deviation to each side of the mean, where rewards were: never below the least or above the greatest.
const band = (name) => (source) => {
  const mean = source.columns[name], std = source.columns[name.replace(/mean$/, "std").replace(/^reward$/, "reward_std")];
  if (!std) return {};
  const [low, high] = observed(source, name === "reward" ? null : name.slice(8, -5));
  const edge = (move) => mean.map((value, place) => (isNumber(value) ? move(value, std[place] || 0) : null));
  return { fill: [edge((value, by) => Math.max(value - by, Math.min(low, value))), edge((value, by) => Math.min(value + by, Math.max(high, value)))] };
};

const range = (low, high) => (source) => {
  const edges = [source.columns[low], source.columns[high]];
  return edges[0] && edges[1] ? { fill: edges } : {};
};

function rewardNames() {
  const found = new Set();
  for (const run of runs) for (const name of Object.keys(run.columns)) if (/^rewards\/.*\/mean$/.test(name)) found.add(name);
  return [...found];
}

function evaluationNames(pattern) {
  const found = new Set();
  for (const run of runs) for (const name of Object.keys(run.evaluations.columns)) if (pattern.test(name)) found.add(name);
  return [...found].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
}

const MOST_FUNCTIONS = 24;

function overviewCharts() {
  const charts = [];
  const put = (title, help, named, options) => {
    const parts = partsOf(named);
    if (parts.length) charts.push(curves(title, help, parts, { unit: unitOf(named[0][0]), ...options }));
  };
  const evaluated = (title, help, pattern, options) => {
    const all = evaluationNames(pattern).slice(0, 12);
    const names = (several() && all.length > 2 ? [all[0], all[all.length - 1]] : all).map((name) => [name, name.replace(/^eval_/, ""), { points: true, smooth: false }]);
    const parts = partsOf(names, (run) => run.evaluations);
    if (parts.length) charts.push(curves(title, help, parts, { unit: unitOf(names[0][0]), ...options }));
  };
  put("Reward", "The mean of a step's completions. The band is one standard deviation to each side, as far as rewards went.", [["reward", "reward", band("reward")]]);
  evaluated("Evaluation", "The mean reward on the evaluation's prompts.", /^eval_(.*_)?reward$/);
  evaluated("pass@k", "The chance that one of k completions passes.", /^eval_.*pass@\d+$/);
  const functions = rewardNames();
  for (const name of functions.slice(0, MOST_FUNCTIONS))
    if (functions.length > 1 || !runs.some((run) => column(run, "reward"))) put(name.slice(8, -5), "One reward function: its mean, and one standard deviation to each side, as far as its rewards went.", [[name, "mean", band(name)]]);
  put("Completion length", "The band goes from the shortest to the longest of the step.", [["completions/mean_length", "mean", range("completions/min_length", "completions/max_length")]]);
  put("Shares of completions and groups", "Truncated: completions cut at max_completion_length. No difference: groups whose rewards are all alike, which carry no signal.", [["completions/clipped_ratio", "truncated"], ["frac_reward_zero_std", "no difference"]]);
  put("Entropy", "Per token. Near 0 the policy hardly explores.", [["entropy", "entropy"]]);
  put("KL to the reference", "Per token; 0 where no reference is held.", [["kl", "kl"]]);
  put("Sampler and trainer", "How far their log-probabilities of the same tokens are apart: the mean and the largest absolute difference.", [["sampling/sampling_logp_difference/mean", "mean"], ["sampling/sampling_logp_difference/max", "largest"]]);
  put("Importance ratio", "The trainer's probability over the sampler's: raw, and as it weighs in the loss after truncation and masks.", [["sampling/raw_ratio/mean", "raw"], ["sampling/importance_sampling_ratio/mean", "corrected"]]);
  put("Clipped and masked", "Shares of tokens whose ratio was clipped, and that the sampler's correction masked away.", [["clip_ratio/region_mean", "clipped"], ["sampling/masked_share", "masked"], ["sampling/truncated_share", "truncated"]]);
  put("Gradient norm", "Before clipping to max_grad_norm.", [["grad_norm", "norm"]]);
  put("Learning rate", null, [["learning_rate", "rate"]]);
  put("Loss", "Of a policy gradient: that it falls says nothing by itself.", [["loss", "loss"]]);
  return charts;
}

const SHOWN = new Set(["reward", "reward_std", "completions/mean_length", "completions/min_length", "completions/max_length", "completions/clipped_ratio", "frac_reward_zero_std", "entropy", "kl", "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max", "sampling/raw_ratio/mean", "sampling/importance_sampling_ratio/mean", "clip_ratio/region_mean", "sampling/masked_share", "sampling/truncated_share", "grad_norm", "learning_rate", "loss"]);

function otherMetrics() {
  const found = new Set();
  for (const run of runs) for (const name of Object.keys(run.columns)) if (!SHOWN.has(name) && name !== "epoch") found.add(name);
  return [...found].sort();
}

function tiles() {
  const run = runs[0];
  const rewards = (column(run, "reward") || []).filter(isNumber);
  const few = Math.max(1, Math.min(5, Math.floor(rewards.length / 4)));
  const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
  const evaluated = evaluationNames(/^eval_(.*_)?reward$/)[0];
  const seconds = (column(run, "step_time") || []).filter(isNumber).reduce((sum, value) => sum + value, 0) * (run.every || 1);
  const sampled = (column(run, "train/sampled_tokens") || []).filter(isNumber).reduce((sum, value) => sum + value, 0) * (run.every || 1);
  const tile = (label, value, note) => el("div.tile", {}, el("div.tile-label", {}, label), el("div.tile-value", {}, value), note && el("div.tile-note", {}, note));
  const first = mean(rewards.slice(0, few)), last = mean(rewards.slice(-few));
  return el(
    "div.tiles",
    {},
    rewards.length > 0 && tile("Reward", fmt(last), rewards.length > 1 ? `from ${fmt(first)}: means of ${plural(few, "step")}` : null),
    evaluated && tile("Evaluation", fmt(lastOf(run.evaluations.columns[evaluated])), `from ${fmt((run.evaluations.columns[evaluated] || []).find(isNumber))}`),
    tile("Steps", fmt(run.status.step), run.status.max_steps ? `of ${fmt(run.status.max_steps)}` : null),
    seconds > 0 && tile("Time in steps", duration(seconds), `${duration(seconds / Math.max(run.status.step, 1))} a step`),
    sampled > 0 && tile("Tokens sampled", sampled >= 1e6 ? `${fmt(sampled / 1e6)} M` : fmt(Math.round(sampled)), null),
    isNumber(lastOf(column(run, "completions/mean_length"))) && tile("Length", measured(lastOf(column(run, "completions/mean_length")), "tokens"), `from ${measured((column(run, "completions/mean_length") || []).find(isNumber), "tokens")}`),
  );
}

function comparison() {
  const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
  const rows = runs.map((run) => {
    const rewards = (column(run, "reward") || []).filter(isNumber);
    const few = Math.max(1, Math.floor(rewards.length / 10));
    const evaluated = Object.keys(run.evaluations.columns).find((name) => /^eval_(.*_)?reward$/.test(name));
    const seconds = (column(run, "step_time") || []).filter(isNumber).reduce((sum, value) => sum + value, 0) * (run.every || 1);
    return [
      el("span", {}, dot(runColour(run.index)), run.name),
      run.status.state,
      `${fmt(run.status.step)}${run.status.max_steps ? ` / ${fmt(run.status.max_steps)}` : ""}`,
      fmt(mean(rewards.slice(0, few))),
      fmt(mean(rewards.slice(-few))),
      evaluated ? fmt(lastOf(run.evaluations.columns[evaluated])) : "–",
      seconds ? duration(seconds) : "–",
    ];
  });
  return card("Side by side", "Rewards are means of the first and the last tenth of the steps.", table(["Run", "State", "Steps", "Reward, first", "Reward, last", "Evaluation", "Time in steps"], rows));
}

function dot(colour) {
  const found = el("span.dot");
  found.style.background = colour;
  return found;
}

// What a step was: numbers, histograms, and the ways to its completions and its time.
function stepPanel() {
  const step = state.step;
  if (step === null) return el("p.hint", {}, "Click a step in any chart to open it here and in the other views.");
  const shown = [
    ["reward", "Reward"], ["reward_std", "Spread"], ["completions/mean_length", "Length"], ["completions/clipped_ratio", "Truncated"], ["frac_reward_zero_std", "No difference"],
    ["entropy", "Entropy"], ["kl", "KL"], ["sampling/sampling_logp_difference/mean", "Sampler–trainer"], ["grad_norm", "Gradient norm"], ["learning_rate", "Learning rate"], ["step_time", "Time"],
  ]; // prettier-ignore
  const columns = runs.filter((run) => run.steps.includes(step));
  const rows = shown
    .filter(([name]) => columns.some((run) => isNumber(metric(run, name, step))))
    .map(([name, label]) => [label, ...columns.map((run) => measured(metric(run, name, step), unitOf(name)))]);
  const alarms = runs.flatMap((run) => run.alarms.filter((alarm) => alarm.step === step).map((alarm) => alarmLine(run, alarm)));
  const run = runs[state.run];
  const spread = run.spreads[step];
  return el(
    "section.card.wide.step-panel",
    {},
    el(
      "div.card-head",
      {},
      el("h3", {}, `Step ${step}`),
      el("button", { onclick: () => change({ view: "completions" }) }, "Its completions"),
      el("button", { onclick: () => change({ view: "time" }) }, "Its time"),
      el("button", { onclick: () => change({ view: "groups" }) }, "Its groups"),
      el("button.quiet", { onclick: () => change({ step: null }), "aria-label": "Close the step" }, "✕"),
    ),
    alarms,
    el(
      "div.step-parts",
      {},
      columns.length ? (several() ? table(["", ...columns.map((each) => each.name)], rows, { className: "facts" }) : el("dl.chips.numbers", {}, rows.map(([name, fact]) => el("div", {}, el("dt", {}, name), el("dd", {}, fact))))) : el("p.hint", {}, "No metrics were logged at this step."),
      spread && spread.rewards && histogram(several() ? `Rewards · ${run.name}` : "Rewards", spread.rewards, ""),
      spread && spread.lengths && histogram(several() ? `Lengths · ${run.name}` : "Lengths", spread.lengths, "tokens"),
    ),
  );
}

function histogram(title, { edges, counts }, unit) {
  const most = Math.max(...counts, 1);
  const drawing = canvas(130, `${title}: ${counts.join(", ")} completions between ${edges.map((edge) => measured(edge, unit)).join(", ")}`, (context, width, height) => {
    const wide = width / counts.length;
    context.fillStyle = css("--accent");
    counts.forEach((count, place) => {
      const tall = (count / most) * (height - 30);
      context.fillRect(place * wide + 0.5, height - 16 - tall, Math.max(wide - 1, 1), tall);
    });
    context.fillStyle = css("--muted");
    context.fillText(measured(edges[0], unit), 0, height - 7);
    context.textAlign = "right";
    context.fillText(measured(edges[edges.length - 1], unit), width, height - 7);
    context.fillText(`most: ${plural(most, "completion")}`, width, 7);
    context.textAlign = "left";
  });
  return el("div.histogram", {}, el("h4", {}, title), drawing);
}

// Histograms over the run: a column per step, darker where more completions are.
const BINS = 32;

function heatMap(run, kind, title, help) {
  const steps = Object.keys(run.spreads).map(Number).filter((step) => run.spreads[step][kind]).sort((a, b) => a - b);
  if (steps.length < 3) return null;
  let low = Infinity, high = -Infinity;
  for (const step of steps) {
    const { edges } = run.spreads[step][kind];
    low = Math.min(low, edges[0]);
    high = Math.max(high, edges[edges.length - 1]);
  }
  if (!(high > low)) return null;
  const bins = steps.map((step) => rebinned(run.spreads[step][kind], low, high));
  const left = 46;
  const drawing = canvas(190, `${title} by step, from ${fmt(low)} to ${fmt(high)}`, (context, width, height) => {
    const tall = (height - 20) / BINS, wide = (width - left) / steps.length;
    context.fillStyle = css("--accent");
    bins.forEach((shares, place) => {
      const most = Math.max(...shares, 1e-9);
      shares.forEach((share, bin) => {
        if (!share) return;
        context.globalAlpha = 0.06 + 0.94 * (share / most);
        context.fillRect(left + place * wide, height - 20 - (bin + 1) * tall, wide + 0.4, tall + 0.4);
      });
    });
    context.globalAlpha = 1;
    if (state.step !== null && steps.includes(state.step)) {
      context.strokeStyle = css("--text");
      context.strokeRect(left + steps.indexOf(state.step) * wide, 0, Math.max(wide, 2), height - 20);
    }
    context.fillStyle = css("--muted");
    context.textAlign = "right";
    for (const share of [0, 0.5, 1]) context.fillText(fmt(low + share * (high - low)), left - 6, Math.max(6, (1 - share) * (height - 20)));
    context.textAlign = "left";
    context.fillText(String(steps[0]), left, height - 8);
    context.textAlign = "right";
    context.fillText(String(steps[steps.length - 1]), width, height - 8);
    context.textAlign = "left";
  });
  const at = (event) => steps[Math.max(0, Math.min(steps.length - 1, Math.floor(((event.offsetX - left) / (drawing.clientWidth - left)) * steps.length)))];
  drawing.addEventListener("click", (event) => change({ step: at(event), run: run.index }));
  drawing.addEventListener("mousemove", (event) => tip(event, `Step ${at(event)}`));
  drawing.addEventListener("mouseleave", () => tip(null));
  const found = card(several() ? `${title} · ${run.name}` : title, help, drawing);
  found.redraw = drawing.redraw;
  return found;
}

function rebinned({ edges, counts }, low, high) {
  const found = new Array(BINS).fill(0);
  counts.forEach((count, place) => {
    const from = ((edges[place] - low) / (high - low)) * BINS, to = ((edges[place + 1] - low) / (high - low)) * BINS;
    const first = Math.max(0, Math.min(BINS - 1, Math.floor(from))), last = Math.max(first, Math.min(BINS - 1, Math.ceil(to) - 1));
    for (let bin = first; bin <= last; bin++) found[bin] += count / (last - first + 1);
  });
  return found;
}

const overviewView = {
  name: "overview",
  title: "Overview",
  build(container) {
    this.panel = el("div.wide");
    this.maps = runs.flatMap((run) => [
      heatMap(run, "rewards", "Rewards of all completions", "A column per step: the darker, the more of its completions have this reward."),
      heatMap(run, "lengths", "Lengths of all completions, tokens", "A column per step: the darker, the more of its completions are this long."),
    ]).filter(Boolean);
    const charts = overviewCharts();
    const more = el("details.wide.more", {}, el("summary", {}, `All other metrics (${otherMetrics().length})`));
    more.addEventListener("toggle", () => {
      if (!more.open || more.children.length > 1) return;
      more.append(el("div.cards", {}, otherMetrics().slice(0, 200).map((name) => curves(name, null, partsOf([[name, name]]), { unit: unitOf(name) }))));
    });
    add(container, several() ? comparison() : tiles(), this.panel, el("div.cards", {}, charts, this.maps), otherMetrics().length > 0 && more);
    if (!charts.length) add(container, el("p.hint", {}, "No step has been logged yet."));
    this.update(new Set(["step"]));
  },
  update(reasons) {
    if (reasons.has("step") || reasons.has("run")) {
      this.panel.replaceChildren(stepPanel());
      for (const map of this.maps) map.redraw();
    }
    for (const chart of live) reasons.has("smoothing") ? chart.draw() : chart.mark();
  },
};
