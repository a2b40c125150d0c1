// Time and memory: where a step's seconds went, what the rollout did inside of them, and what memory was planned for.

const PHASES = ["generate", "reward", "train", "optimizer", "publish", "wake", "journal", "pack", "log", "sleep", "offload", "ref_logprobs", "old_logprobs", "sync"];

function phasesOf(run) {
  const there = Object.keys(run.columns).filter((name) => name.startsWith("time/")).map((name) => name.slice(5));
  const known = PHASES.filter((name) => there.includes(name));
  const rest = there.filter((name) => !known.includes(name) && name !== "other").sort();
  return [...known, ...rest, ...(there.includes("other") ? ["other"] : [])].map((name, place) => ({ name, values: run.columns[`time/${name}`], colour: name === "other" ? css("--faint") : seriesColour(place) }));
}

function stackedBars(run) {
  const phases = phasesOf(run);
  if (!phases.length) return card("Where a step's time went", null, el("p.hint", {}, "No times were logged."));
  const steps = run.steps;
  const totals = phases.map((phase) => phase.values.reduce((sum, value) => sum + Math.max(value || 0, 0), 0));
  const all = totals.reduce((sum, value) => sum + value, 0) || 1;
  const left = 46;
  // As many bars as have room: each is the mean of the steps that share it.
  const grouped = (width) => Math.max(1, Math.ceil(steps.length / Math.max(1, Math.floor((width - left) / 3))));
  const drawing = canvas(230, `Seconds of each step by phase: ${phases.map((phase, place) => `${phase.name} ${percent(totals[place] / all)}`).join(", ")}`, (context, width, height) => {
    const each = grouped(width), bars = Math.ceil(steps.length / each), wide = Math.min((width - left) / bars, 60);
    const stacks = Array.from({ length: bars }, (_, bar) => phases.map((phase) => meanOf(phase.values.slice(bar * each, (bar + 1) * each))));
    const sums = stacks.map((stack) => stack.reduce((sum, value) => sum + value, 0)).sort((a, b) => a - b);
    const top = Math.max(Math.min(sums[sums.length - 1], 3 * sums[Math.floor(sums.length / 2)]), 1e-6) * 1.05; // one long step doesn't flatten the rest
    context.strokeStyle = css("--grid");
    context.fillStyle = css("--muted");
    context.textAlign = "right";
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      const y = height - 20 - share * (height - 30);
      context.beginPath();
      context.moveTo(left, y);
      context.lineTo(width, y);
      context.stroke();
      context.fillText(`${fmt(share * top)} s`, left - 6, y);
    }
    stacks.forEach((stack, bar) => {
      let y = height - 20;
      stack.forEach((seconds, place) => {
        const tall = (Math.max(seconds, 0) / top) * (height - 30);
        context.fillStyle = phases[place].colour;
        context.fillRect(left + bar * wide, Math.max(y - tall, 0), Math.max(wide - (wide > 4 ? 1 : 0), 1), Math.min(tall, y));
        y = Math.max(y - tall, 0);
      });
    });
    const chosen = steps.indexOf(state.step);
    if (chosen >= 0) {
      context.strokeStyle = css("--text");
      context.lineWidth = 1.5;
      context.strokeRect(left + Math.floor(chosen / each) * wide, 2, wide, height - 22);
    }
    context.fillStyle = css("--muted");
    context.textAlign = "left";
    context.fillText(String(steps[0] ?? ""), left, height - 8);
    context.textAlign = "right";
    context.fillText(String(steps[steps.length - 1] ?? ""), left + bars * wide, height - 8);
    context.textAlign = "left";
    drawing.each = each;
    drawing.wide = wide;
  });
  const at = (event) => {
    const bar = Math.floor((event.offsetX - left) / (drawing.wide || 1));
    return bar < 0 || bar * drawing.each >= steps.length ? null : Math.min(bar * drawing.each, steps.length - 1);
  };
  drawing.addEventListener("click", (event) => at(event) !== null && change({ step: steps[at(event)] }));
  drawing.addEventListener("mousemove", (event) => {
    const place = at(event);
    if (place === null) return tip(null);
    const parts = phases.map((phase) => [phase, phase.values[place]]).filter(([, seconds]) => seconds > 0.005).sort((a, b) => b[1] - a[1]);
    tip(event, el("strong", {}, `Step ${steps[place]}: ${duration(parts.reduce((sum, [, seconds]) => sum + seconds, 0))}`), parts.map(([phase, seconds]) => el("div", {}, dot(phase.colour), `${phase.name} ${fmt(seconds)} s`)));
  });
  drawing.addEventListener("mouseleave", () => tip(null));
  const legend = el("div.legend", {}, phases.map((phase, place) => el("span", {}, dot(phase.colour), `${phase.name} ${percent(totals[place] / all)}`)));
  const found = card("Where a step's time went", "Phases don't overlap: a reward that is computed while the engine decodes costs nothing here.", drawing, legend);
  found.redraw = drawing.redraw;
  found.classList.add("wide");
  return found;
}

function meanOf(values) {
  const known = values.filter(isNumber);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : 0;
}

// The inside of a round's rollout, a lane per rank.
function lanes(rollouts) {
  const longest = Math.max(...rollouts.map((rollout) => Math.max(rollout.seconds || 0, rollout.until || 0, ...rollout.running.map(([t]) => t))), 1e-3);
  const most = Math.max(...rollouts.flatMap((rollout) => rollout.running.concat(rollout.waiting).map(([, count]) => count)), 1);
  return rollouts.map((rollout) => {
    const tools = rollout.tools.length > 0, trained = rollout.trained.length > 0;
    const left = 54, tall = 96, height = tall + (rollout.rewards.length ? 18 : 0) + (tools ? 18 : 0) + (trained ? 18 : 0) + 22;
    const told = rolloutWords(rollout);
    const drawing = canvas(height, `Rank ${rollout.rank}: ${told}`, (context, width) => {
      const x = (t) => left + (t / longest) * (width - left - 8), y = (share) => 4 + (1 - share) * (tall - 6);
      const path = (points, scale) => {
        context.beginPath();
        points.forEach(([t, value], place) => (place ? context.lineTo(x(t), y(value / scale)) : context.moveTo(x(t), y(value / scale))));
      };
      if (isNumber(rollout.tail)) {
        context.fillStyle = css("--tail");
        context.fillRect(x(rollout.tail), 0, Math.max(x(rollout.seconds || longest) - x(rollout.tail), 0), tall);
        context.fillStyle = css("--muted");
        context.fillText("tail", Math.min(x(rollout.tail) + 4, width - 26), 9);
      }
      if (rollout.running.length) {
        path(rollout.running, most);
        context.strokeStyle = css("--accent");
        context.lineWidth = 1.75;
        context.stroke();
        context.lineTo(x(rollout.running[rollout.running.length - 1][0]), y(0));
        context.lineTo(x(rollout.running[0][0]), y(0));
        context.fillStyle = css("--accent");
        context.globalAlpha = 0.16;
        context.fill();
        context.globalAlpha = 1;
      }
      context.lineWidth = 1.25;
      if (rollout.waiting.some(([, count]) => count > 0)) {
        path(rollout.waiting, most);
        context.strokeStyle = css("--warn");
        context.stroke();
      }
      if (rollout.kv.length) {
        path(rollout.kv, 1);
        context.setLineDash([3, 3]);
        context.strokeStyle = seriesColour(2);
        context.stroke();
        context.setLineDash([]);
      }
      let row = tall + 4;
      const spans = (list, colour, label) => {
        context.fillStyle = colour;
        context.globalAlpha = 0.75;
        for (const [, from, to] of list) context.fillRect(x(from), row, Math.max(x(to) - x(from), 2), 11);
        context.globalAlpha = 1;
        context.fillStyle = css("--muted");
        context.textAlign = "right";
        context.fillText(label, left - 6, row + 6);
        context.textAlign = "left";
        row += 18;
      };
      if (rollout.rewards.length) spans(rollout.rewards, seriesColour(1), "rewards");
      if (tools) spans(rollout.tools, seriesColour(4), "tools");
      if (trained) spans(rollout.trained, seriesColour(3), "training");
      context.fillStyle = css("--muted");
      context.textAlign = "right";
      context.fillText(`${most} seq.`, left - 6, 8);
      context.fillText("0", left - 6, tall - 4);
      context.fillText(`${fmt(longest)} s`, width - 4, height - 8);
      context.textAlign = "left";
      context.fillText("0 s", left, height - 8);
    });
    return el("div.lane", {}, el("h4", {}, `Rank ${rollout.rank}`, el("span.hint", {}, ` ${told}`)), drawing);
  });
}

function rolloutWords(rollout) {
  const peak = Math.max(...rollout.running.map(([, count]) => count), 0);
  const busy = (spans) => fmt(spans.reduce((sum, [, from, to]) => sum + Math.max(to - from, 0), 0));
  const kv = Math.max(...rollout.kv.map(([, share]) => share), 0);
  const tail = isNumber(rollout.tail) && rollout.seconds ? `tail from ${fmt(rollout.tail)} s (${percent((rollout.seconds - rollout.tail) / rollout.seconds)} of the time)` : null;
  // Of what was trained early only that after its own sampling: a rank that trains amid its decoding doesn't wait.
  const early = rollout.trained.reduce((sum, [, from, to]) => sum + Math.max(to - Math.max(from, rollout.seconds), 0), 0);
  const waited = isNumber(rollout.until) ? rollout.until - rollout.seconds - early : 0;
  return [
    `${fmt(rollout.seconds)} s`, `at most ${peak} sequences`, tail, rollout.kv.length ? `KV cache at most ${percent(kv)} full` : null,
    rollout.preemptions ? plural(rollout.preemptions, "preemption") : null, rollout.rewards.length ? `rewards ${busy(rollout.rewards)} s` : null,
    rollout.tools.length ? `tools ${busy(rollout.tools)} s` : null, rollout.trained.length ? `trained ${busy(rollout.trained)} s beside the tail` : null,
    waited > 0.01 * rollout.until ? `waited ${fmt(waited)} s for other ranks` : null,
  ].filter(Boolean).join(", ") + "."; // prettier-ignore
}

// The rollout of a step: a round's is recorded at the first of its steps.
function roundSteps(run) {
  return [...run.held.keys()].sort((a, b) => a - b);
}

async function showLanes(run, box) {
  const asked = state.step ?? run.status.step;
  const before = roundSteps(run).filter((step) => step <= asked).reverse();
  box.dataset.asked = asked;
  for (const step of [...before.slice(0, 8), ...roundSteps(run).filter((each) => each > asked).slice(0, 2)]) {
    const content = await loadStep(run, step).catch(() => null);
    if (box.dataset.asked !== String(asked)) return; // another step was opened meanwhile
    if (!content || !content.rollouts.length) continue;
    const note = step === asked ? "" : ` (recorded nearest to step ${asked})`;
    box.replaceChildren(
      el("p.hint", {}, `The rollout of step ${step}${note}. `, el("span", {}, dot(css("--accent")), "sequences running "), el("span", {}, dot(css("--warn")), "waiting "), el("span", {}, dot(seriesColour(2)), "KV cache, of its size")),
      ...lanes(content.rollouts),
    );
    return;
  }
  box.replaceChildren(el("p.hint", {}, "No rollout was recorded here."));
}

function speedCharts() {
  const rates = (tokens, time) => (run) => {
    const [counts, seconds] = [column(run, tokens), column(run, time)];
    return counts && seconds ? counts.map((count, place) => (isNumber(count) && seconds[place] > 0 ? count / seconds[place] : null)) : null;
  };
  const parts = [];
  for (const run of runs) {
    [["sampled", "train/sampled_tokens", "time/generate"], ["trained", "train/packed_tokens", "time/train"]].forEach(([label, tokens, time], place) => {
      const values = rates(tokens, time)(run);
      if (values && values.some(isNumber))
        parts.push({ label: several() ? `${run.name} · ${label}` : label, steps: run.steps, values, colour: several() ? runColour(run.index) : seriesColour(place), dash: several() ? DASHES[place] : undefined });
    });
  }
  const found = [];
  if (parts.length) found.push(curves("Speed", "Completion tokens over the seconds of generating; packed tokens, prompts among them, over those of forward and backward. Of all ranks.", parts, { unit: "tokens/s" }));
  const mfu = partsOf([["mfu", "utilisation"]]);
  if (mfu.length) found.push(curves("Model FLOP utilisation", "Floating point operations of forward and backward, over the seconds of training times the peak. How it is reckoned stands below.", mfu, { unit: "%" }));
  const memory = partsOf([...new Set(runs.flatMap((run) => Object.keys(run.columns)))].filter((name) => name.startsWith("memory/")).slice(0, 8).map((name) => [name, memoryName(name)]));
  if (memory.length) found.push(curves("Measured memory", "As logged at each step.", memory, { unit: "GiB" }));
  return found;
}

const memoryName = (name) => name.slice(7).replace(/_gib$/, "");

function utilisationWords(run) {
  const facts = run.run;
  if (!facts.peak_flops) return null;
  const size = fmt(facts.peak_flops / 1e12);
  return el(
    "details.card.wide",
    {},
    el("summary", {}, "How the utilisation is reckoned"),
    el("p", {}, "Operations of a step's forward and backward = ", el("code", {}, "6 · M · t + 6 · H · c + 12 · A · p"), ", with M the elements of the layers' matrices (4 in place of 6 where they are frozen), t the packed tokens (a shared prompt counts once), H the head's matrix, c the completion tokens, A = layers · heads · head size, and p the pairs of a query and a key that it sees. Work that is done again isn't counted. Utilisation = operations / (seconds of the phase train · peak)."),
    el("p", {}, `Peak of one rank: ${size} TFLOP/s (${facts.peak_source || "source not recorded"}). ${fmt(facts.parameters)} parameters, ${fmt(facts.trained_parameters)} of them trained; ${plural(facts.ranks || 1, "rank")}, ${facts.device || "device not recorded"}.`),
  );
}

function memoryPlan(run) {
  if (!run.memory.length) return null;
  const total = (name) => run.memory.reduce((sum, row) => sum + (row[name] || 0), 0);
  const rows = run.memory.map((row) => [row.part, measured(row.sampling, "GiB"), measured(row.training, "GiB")]);
  const peaks = Object.keys(run.columns)
    .filter((name) => name.startsWith("memory/"))
    .map((name) => [name, Math.max(...run.columns[name].filter(isNumber))]);
  return card(
    several() ? `Memory plan · ${run.name}` : "Memory plan",
    "Of a rank's device: what the plan at the start gives each part, while the engine samples and while the policy trains.",
    table(["Part", "Sampling", "Training"], [...rows, el("tr.total", {}, el("td", {}, "planned in all"), el("td", {}, measured(total("sampling"), "GiB")), el("td", {}, measured(total("training"), "GiB"))), ...peaks.map(([name, value]) => el("tr.measured", {}, el("td", {}, `measured: ${memoryName(name)}, at most`), el("td", { colSpan: 2 }, measured(value, "GiB"))))], { className: "numbers" }),
  );
}

const timeView = {
  name: "time",
  title: "Time and memory",
  build(container) {
    const run = runs[state.run];
    this.lanes = el("div");
    this.bars = stackedBars(run);
    const inside = card("Inside the rollout", "How many sequences the engine had running over the rollout's time. The tail is where fewer than half of the most are left.", this.lanes);
    inside.classList.add("wide");
    add(container, runPicker(), el("div.cards", {}, this.bars, inside, speedCharts(), memoryPlan(run), utilisationWords(run)));
    showLanes(run, this.lanes);
  },
  update(reasons) {
    if (reasons.has("step")) {
      if (this.bars.redraw) this.bars.redraw();
      showLanes(runs[state.run], this.lanes);
    }
    for (const chart of live) reasons.has("smoothing") ? chart.draw() : chart.mark();
  },
};

// Views that show one run have a choice where there are several.
function runPicker() {
  if (!several()) return null;
  return el("p.picker", {}, el("label", {}, "Run ", select("Run", runs.map((run) => [String(run.index), run.name]), String(state.run), (value) => change({ run: Number(value) }))));
}
