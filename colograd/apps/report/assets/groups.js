// Groups: which prompts are solved, which carry a signal, and how each went over the epochs.

function sharesChart(run) {
  const { steps, solved, unsolved, mixed } = run.groups;
  if (!steps.length) return card("Solved, mixed and unsolved prompts", null, el("p.hint", {}, "No groups were recorded."));
  const kinds = [["solved", solved, css("--good")], ["mixed", mixed, css("--accent")], ["unsolved", unsolved, css("--faint")]];
  const left = 46;
  const drawing = canvas(220, "Shares of prompts by step", (context, width, height) => {
    const bars = Math.min(steps.length, Math.max(1, Math.floor((width - left) / 2))), each = Math.ceil(steps.length / bars), wide = (width - left) / Math.ceil(steps.length / each);
    for (let bar = 0; bar * each < steps.length; bar++) {
      const sums = kinds.map(([, counts]) => counts.slice(bar * each, (bar + 1) * each).reduce((sum, count) => sum + count, 0));
      const all = sums.reduce((sum, count) => sum + count, 0) || 1;
      let y = height - 20;
      kinds.forEach(([, , colour], place) => {
        const tall = (sums[place] / all) * (height - 24);
        context.fillStyle = colour;
        context.globalAlpha = 0.85;
        context.fillRect(left + bar * wide, y - tall, wide - (wide > 5 ? 1 : -0.3), tall);
        y -= tall;
      });
    }
    context.globalAlpha = 1;
    const chosen = steps.indexOf(state.step);
    if (chosen >= 0) {
      context.strokeStyle = css("--text");
      context.lineWidth = 1.5;
      context.strokeRect(left + Math.floor(chosen / each) * wide, 4, wide, height - 24);
    }
    context.fillStyle = css("--muted");
    context.textAlign = "right";
    for (const share of [0, 0.5, 1]) context.fillText(`${100 * share} %`, left - 6, Math.max(8, 4 + (1 - share) * (height - 24)));
    context.textAlign = "left";
    context.fillText(String(steps[0]), left, height - 8);
    context.textAlign = "right";
    context.fillText(String(steps[steps.length - 1]), width, height - 8);
    context.textAlign = "left";
  });
  const at = (event) => Math.max(0, Math.min(steps.length - 1, Math.floor(((event.offsetX - left) / (drawing.clientWidth - left)) * steps.length)));
  drawing.addEventListener("click", (event) => change({ step: steps[at(event)] }));
  drawing.addEventListener("mousemove", (event) => tip(event, el("strong", {}, `Step ${steps[at(event)]}`), kinds.map(([name, counts, colour]) => el("div", {}, dot(colour), `${name}: ${counts[at(event)]}`))));
  drawing.addEventListener("mouseleave", () => tip(null));
  const found = card(
    "Solved, mixed and unsolved prompts",
    `Mixed: the group's rewards differ, so it carries a signal. Solved and unsolved: they are all alike, with a mean from ${fmt(run.groups.mark)} on, or below.`,
    drawing,
    el("div.legend", {}, kinds.map(([name, , colour]) => el("span", {}, dot(colour), name))),
  );
  found.redraw = drawing.redraw;
  found.classList.add("wide");
  return found;
}

function spark(history) {
  return canvas(26, `Mean rewards: ${history.map(([, mean]) => fmt(mean)).join(", ")}`, (context, width, height) => {
    const means = history.map(([, mean]) => mean).filter(isNumber);
    const low = Math.min(...means, 0), high = Math.max(...means, low + 1e-9);
    context.strokeStyle = css("--accent");
    context.fillStyle = css("--accent");
    context.beginPath();
    history.forEach(([, mean], place) => {
      const x = 3 + (place / Math.max(history.length - 1, 1)) * (width - 6), y = height - 3 - (((mean ?? low) - low) / (high - low)) * (height - 6);
      place ? context.lineTo(x, y) : context.moveTo(x, y);
      context.fillRect(x - 1.5, y - 1.5, 3, 3);
    });
    context.stroke();
  });
}

const PROMPT_ORDERS = {
  signal: ["most signal", (row) => -row[1]],
  hard: ["lowest last reward", (row) => value(row[2][row[2].length - 1][1], Infinity)],
  better: ["most improved", (row) => -((row[2][row[2].length - 1][1] ?? 0) - (row[2][0][1] ?? 0))],
  worse: ["most worsened", (row) => (row[2][row[2].length - 1][1] ?? 0) - (row[2][0][1] ?? 0)],
};

const groupsView = {
  name: "groups",
  title: "Groups",
  order: "signal",
  most: 20, // prompts shown at once
  build(container) {
    const run = runs[state.run];
    this.chart = sharesChart(run);
    this.step = el("div");
    this.prompts = el("div");
    this.history = el("div");
    const over = run.groups.steps.length ? curves("Groups that carry a signal", "Prompts of each step whose completions are trained on.", [{ label: "with a signal", steps: run.groups.steps, values: run.groups.signal, colour: several() ? runColour(run.index) : seriesColour(0) }], { unit: "groups" }) : null;
    add(container, runPicker(), el("div.cards", {}, this.chart, over, card("Groups of the step", "Bars: mean rewards, from the highest to the lowest; a pale bar carries no signal.", this.step)));
    const { total, visits, half, shown } = run.prompts;
    if (shown.length) {
      add(
        container,
        card(
          "Prompts",
          "Signal: the standard deviation of the group's rewards, summed over the prompt's visits.",
          el("p", {}, `${plural(total, "prompt")} in ${plural(visits, "group")}. `, half ? `Half of all reward difference came from ${plural(half, "prompt")} (${percent(half / total)}). ` : "No group had a reward difference. ", shown.length < total && `Listed: the ${shown.length} with the most.`),
          el("p", {}, "Order: ", select("Order of prompts", Object.entries(PROMPT_ORDERS).map(([key, [label]]) => [key, label]), this.order, (chosen) => { this.order = chosen; this.list(run); })),
          this.history,
          this.prompts,
        ),
      ); // prettier-ignore
      this.list(run);
    }
    this.ofStep(run);
  },
  list(run) {
    const rows = run.prompts.shown.slice().sort((a, b) => PROMPT_ORDERS[this.order][1](a) - PROMPT_ORDERS[this.order][1](b));
    this.prompts.replaceChildren();
    add(
      this.prompts,
      table(
        ["Prompt", "Mean rewards over its visits", "Visits", "First", "Last", "Signal"],
        rows.slice(0, this.most).map(([key, signal, history]) => [
          el("button.open", { onclick: () => this.showHistory(run, key, history) }, promptName(run, key)),
          spark(history), history.length, fmt(history[0][1]), fmt(history[history.length - 1][1]), fmt(signal),
        ]),
        { className: "prompts" },
      ),
      rows.length > this.most && el("button", { onclick: () => { this.most += 60; this.list(run); } }, `Show more (${rows.length - this.most})`),
    ); // prettier-ignore
  },
  // A prompt's visits; its text is looked for in the steps of the page that have completions.
  async showHistory(run, key, history) {
    const asked = el("p.prompt-text", {}, "Looking for its text …");
    this.history.replaceChildren(
      el(
        "div.history",
        {},
        el("div.card-head", {}, el("h4", {}, promptName(run, key)), el("button.quiet", { "aria-label": "Close", onclick: () => this.history.replaceChildren() }, "✕")),
        asked,
        table(["Step", "Mean reward", "Spread", "Truncated", ""], history.map(([step, mean, spread, truncated]) => [step, fmt(mean), fmt(spread), percent(truncated), el("button", { onclick: () => change({ step, view: "completions" }) }, "Completions")]), { className: "numbers" }),
      ),
    );
    this.history.scrollIntoView({ block: "nearest" });
    const steps = new Set(history.map(([step]) => step));
    for (const step of completionSteps(run).filter((each) => steps.has(each))) {
      const content = await loadStep(run, step).catch(() => null);
      const found = content && content.completions.find((completion) => completion.key === key);
      if (found) {
        asked.replaceChildren(visible(short(promptText(found.promptValue), 600)));
        return;
      }
    }
    asked.replaceChildren("Its text isn't in this page: none of its completions was recorded.");
  },
  async ofStep(run) {
    const asked = state.step ?? run.groups.steps[run.groups.steps.length - 1];
    this.step.dataset.asked = asked;
    const step = nearest(roundSteps(run), asked ?? 0);
    const content = step === null ? null : await loadStep(run, step).catch(() => null);
    if (this.step.dataset.asked !== String(asked)) return;
    if (!content || !content.groups.length) {
      this.step.replaceChildren(el("p.hint", {}, "This step's groups aren't in the page."));
      return;
    }
    const groups = content.groups.slice().sort((a, b) => value(b[3]) - value(a[3]));
    const means = groups.map((group) => group[3]).filter(isNumber);
    const low = Math.min(0, ...means), high = Math.max(...means, low + 1e-9);
    const left = 46;
    const drawing = canvas(160, `Mean rewards of ${groups.length} groups: ${means.map((mean) => fmt(mean)).join(", ")}`, (context, width, height) => {
      const wide = Math.min((width - left) / groups.length, 34);
      const y = (mean) => 6 + (1 - (mean - low) / (high - low)) * (height - 14);
      groups.forEach(([, , , mean, spread, , signal], place) => {
        if (!isNumber(mean)) return;
        const x = left + place * wide;
        context.fillStyle = signal ? css("--accent") : css("--faint");
        context.fillRect(x, Math.min(y(mean), y(Math.max(low, 0))), Math.max(wide - 2, 1), Math.max(Math.abs(y(mean) - y(Math.max(low, 0))), 2));
        if (spread > 0 && wide > 5) {
          context.strokeStyle = css("--text");
          context.beginPath();
          context.moveTo(x + wide / 2 - 1, y(Math.min(mean + spread, high)));
          context.lineTo(x + wide / 2 - 1, y(Math.max(mean - spread, low)));
          context.stroke();
        }
      });
      context.fillStyle = css("--muted");
      context.textAlign = "right";
      context.fillText(fmt(high), left - 6, 8);
      context.fillText(fmt(low), left - 6, height - 8);
      context.textAlign = "left";
    });
    const at = (event) => groups[Math.floor((event.offsetX - left) / Math.min((drawing.clientWidth - left) / groups.length, 34))];
    drawing.addEventListener("mousemove", (event) => {
      const group = at(event);
      if (group) tip(event, el("strong", {}, `#${group[1]} `, short(promptName(run, group[0]), 120)), el("div", {}, `${plural(group[2], "completion")}, mean ${fmt(group[3])}, spread ${fmt(group[4])}, truncated ${percent(group[5])}`));
      else tip(null);
    });
    drawing.addEventListener("mouseleave", () => tip(null));
    this.step.replaceChildren(el("p.hint", {}, step === asked ? `Step ${step}: ${plural(groups.length, "group")}.` : `Step ${step} (the nearest in this page to step ${asked}): ${plural(groups.length, "group")}.`), drawing);
  },
  update(reasons) {
    if (reasons.has("step")) {
      if (this.chart.redraw) this.chart.redraw();
      this.ofStep(runs[state.run]);
    }
    for (const chart of live) reasons.has("smoothing") ? chart.draw() : chart.mark();
  },
};
