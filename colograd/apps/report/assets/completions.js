// Completions: of a step or of all steps in the page, filtered and sorted; one opened by tokens, or two side by side.

const ORDERS = {
  group: ["by group", null],
  "reward-high": ["highest reward", (c) => -value(c.reward)],
  "reward-low": ["lowest reward", (c) => value(c.reward, Infinity)],
  "advantage-high": ["highest advantage", (c) => -value(c.advantage)],
  "advantage-low": ["lowest advantage", (c) => value(c.advantage, Infinity)],
  long: ["longest", (c) => -value(c.length)],
  short: ["shortest", (c) => value(c.length, Infinity)],
};
const value = (number, otherwise = -Infinity) => (isNumber(number) ? number : otherwise);
const ROWS = 100; // shown at once

function completionSteps(run) {
  return [...run.held].filter(([, has]) => has).map(([step]) => step).sort((a, b) => a - b);
}

const completionsView = {
  name: "completions",
  title: "Completions",
  filters: { purpose: "", group: "", finish: "", order: "group", text: "", low: "", high: "", all: false },
  opened: [], // one completion, or two side by side
  chosen: false, // by somebody, not because it is the worst
  build(container) {
    const run = runs[state.run];
    const filters = this.filters;
    this.known = []; // completions that the filters are over
    this.opened = [];
    this.chosen = this.closed = false;
    this.most = ROWS;
    const again = (name) => (chosen) => {
      filters[name] = chosen;
      this.most = ROWS;
      this.list();
    };
    this.where = el("p.hint");
    this.groupBox = el("span");
    const search = el("input", { type: "search", placeholder: "Search in texts", "aria-label": "Search in texts", value: filters.text, oninput: (event) => again("text")(event.target.value) });
    const bound = (name, label) => el("input.bound", { type: "number", step: "any", placeholder: label, "aria-label": label, value: filters[name], oninput: (event) => again(name)(event.target.value) });
    const all = el("input", { type: "checkbox", checked: filters.all, onchange: (event) => {
      filters.all = event.target.checked;
      filters.group = "";
      this.load();
    } }); // prettier-ignore
    this.bar = el(
      "div.filters",
      {},
      search,
      el("span", {}, (this.purposeBox = el("span"))),
      this.groupBox,
      select("How it ended", [["", "any end"], ["stop", "ended by itself"], ["length", "truncated"], ["repetition", "repeated itself"], ["abort", "aborted"]], filters.finish, again("finish")),
      select("Order", Object.entries(ORDERS).map(([key, [label]]) => [key, label]), filters.order, again("order")),
      bound("low", "reward ≥"),
      bound("high", "reward ≤"),
      el("label.check", {}, all, " all steps"),
    );
    this.rows = el("div");
    this.detail = el("div.detail");
    this.jump = el("button.quiet.jump", { onclick: () => this.detail.scrollIntoView() }, "The lowest reward is open below ↓");
    add(container, runPicker(), this.where, this.bar, this.jump, el("div.completions", {}, this.rows, this.detail));
    this.load();
  },
  update(reasons) {
    if (reasons.has("step")) {
      this.load();
    }
  },
  // The steps whose completions are listed.
  steps() {
    const run = runs[state.run], there = completionSteps(run);
    if (this.filters.all) return there;
    const step = state.step === null ? there[there.length - 1] : nearest(there, state.step);
    return step === undefined || step === null ? [] : [step];
  },
  async load() {
    const run = runs[state.run], steps = this.steps(), there = completionSteps(run);
    const token = (this.loading = {});
    this.known = [];
    this.leftOut = 0;
    if (!steps.length) {
      this.where.replaceChildren("No completions were recorded: train with report: true, or log_completions: true.");
      this.rows.replaceChildren();
      return;
    }
    for (const step of steps) {
      let content;
      try {
        content = await loadStep(run, step);
      } catch (error) {
        this.where.replaceChildren(visible(`Step ${step}: ${error.message}`));
        continue;
      }
      if (this.loading !== token) return; // something else was asked for meanwhile
      this.known = this.known.concat(content.completions);
      this.leftOut += content.left_out;
      if (this.filters.all && this.known.length % 400 < content.completions.length) this.list(); // show what is there so far
    }
    const [here, recorded] = run.chosen || [there.length, there.length];
    const where = this.filters.all ? `All ${plural(steps.length, "step")} with completions in this page` : `Step ${steps[0]}`;
    const near = !this.filters.all && state.step !== null && steps[0] !== state.step ? ` (the nearest to step ${state.step} that has any here)` : "";
    const held = here < recorded ? ` The page has room for the completions of ${here} of the ${recorded} steps that recorded some, spread over the run and those of alarms among them.` : "";
    const left = this.leftOut ? ` ${plural(this.leftOut, "completion")} more were logged than are shown here, in groups.` : "";
    this.where.replaceChildren(visible(`${where}${near}: ${plural(this.known.length, "completion")}.${left}${held}`));
    this.choices();
    this.list();
    if (!this.known.includes(this.opened[0]) && !this.closed) {
      this.opened = this.worst();
      this.chosen = false;
    }
    this.show();
  },
  isWorst() {
    return !this.chosen && this.opened.length > 0 && isNumber(this.opened[0].reward);
  },
  // What somebody looks for first; one that was trained on rather than an evaluation's.
  worst() {
    const rank = (c) => [c.purpose === "train" ? 0 : 1, value(c.reward, Infinity)];
    const [first] = this.filtered().sort((a, b) => rank(a)[0] - rank(b)[0] || (rank(a)[1] < rank(b)[1] ? -1 : rank(a)[1] > rank(b)[1] ? 1 : 0));
    return first ? [first] : [];
  },
  // Choices of groups and purposes, which depend on what was loaded.
  choices() {
    const filters = this.filters;
    const purposes = [...new Set(this.known.map((completion) => completion.purpose))];
    if (!purposes.includes(filters.purpose)) filters.purpose = "";
    this.purposeBox.replaceChildren();
    if (purposes.length > 1) this.purposeBox.append(select("Purpose", [["", "all purposes"], ...purposes.map((name) => [name, visible(name)])], filters.purpose, (chosen) => { filters.purpose = chosen; this.list(); }));
    const groups = [...new Set(this.known.map(groupKey))];
    if (!groups.includes(filters.group)) filters.group = "";
    const label = (key) => {
      const one = this.known.find((completion) => groupKey(completion) === key);
      return visible(`${one.position}: ${short(promptText(one.promptValue).replace(/\s+/g, " "), 40)}`);
    };
    this.groupBox.replaceChildren();
    if (groups.length > 1 && groups.length <= 600) this.groupBox.append(select("Group", [["", `all ${groups.length} groups`], ...groups.map((key) => [key, label(key)])], filters.group, (chosen) => { filters.group = chosen; this.list(); }));
  },
  filtered() {
    const { purpose, group, finish, order, text, low, high } = this.filters;
    const wanted = text.toLowerCase();
    const found = this.known.filter(
      (c) =>
        (!purpose || c.purpose === purpose) && (!group || groupKey(c) === group) && (!finish || c.finish === finish) &&
        (low === "" || value(c.reward) >= Number(low)) && (high === "" || value(c.reward, Infinity) <= Number(high)) &&
        (!wanted || c.text.toLowerCase().includes(wanted) || promptText(c.promptValue).toLowerCase().includes(wanted)),
    ); // prettier-ignore
    const key = ORDERS[order][1];
    return key ? found.slice().sort((a, b) => key(a) - key(b)) : found;
  },
  list() {
    const found = this.filtered();
    const grouped = this.filters.order === "group";
    const rows = [];
    let before = null;
    for (const completion of found.slice(0, this.most)) {
      const key = groupKey(completion);
      if (grouped && key !== before) {
        before = key;
        rows.push(el("tr.group", {}, el("td", { colSpan: 6 }, this.filters.all && el("span.pill", {}, `step ${completion.step}`), completion.purpose !== "train" && el("span.pill", {}, completion.purpose), el("strong", {}, `#${completion.position} `), short(promptText(completion.promptValue), 160))));
      }
      rows.push(this.row(completion, grouped));
    }
    const head = ["", "Completion", "Reward", "Advantage", "Tokens", "End"];
    const shown = table(head, rows, { className: "list" });
    this.rows.replaceChildren(
      el("p.hint.count", { "aria-live": "polite" }, `${plural(found.length, "completion")}${found.length < this.known.length ? ` of ${this.known.length}` : ""}`),
      shown,
    );
    if (found.length > this.most) this.rows.append(el("button", { onclick: () => { this.most += 4 * ROWS; this.list(); } }, `Show more (${found.length - this.most})`)); // prettier-ignore
    this.marks();
  },
  row(completion, grouped) {
    const open = el("button.open", { onclick: () => this.open(completion, false) }, snippet(completion.text, this.filters.text));
    const beside = el("button.beside", { title: "Put beside the opened one", "aria-label": `Put completion ${completion.index} beside the opened one`, onclick: () => this.open(completion, true) }, "⇆");
    const advantage = el("td", {}, fmt(completion.advantage));
    if (isNumber(completion.advantage) && completion.advantage) advantage.classList.add(completion.advantage > 0 ? "up" : "down");
    const found = el(
      "tr",
      { onclick: (event) => event.target.closest("button") || this.open(completion, event.ctrlKey || event.metaKey) },
      el("td", {}, beside),
      el("td.snippet", {}, !grouped && el("span.pill", {}, `${this.filters.all ? `step ${completion.step} ` : ""}#${completion.position}`), open),
      el("td", { title: Object.entries(completion.rewards || {}).map(([name, reward]) => visible(`${name} ${fmt(reward)}`)).join(", ") }, fmt(completion.reward)),
      advantage,
      el("td", {}, completion.length ?? "–", completion.cut && "+"),
      el("td", {}, completion.finish || "–"),
    );
    found.completion = completion;
    return found;
  },
  open(completion, beside) {
    const start = performance.now();
    if (beside && this.opened.length && this.opened[0] !== completion) this.opened = [this.opened[0], completion];
    else this.opened = [completion];
    this.chosen = true;
    this.show();
    if (!beside && window.innerWidth < 1100) this.detail.scrollIntoView({ block: "start" });
    this.took = performance.now() - start;
  },
  marks() {
    for (const row of this.rows.querySelectorAll("tr")) if (row.completion) row.classList.toggle("chosen", this.opened.includes(row.completion));
  },
  show() {
    this.marks();
    this.jump.hidden = !this.isWorst();
    if (!this.opened.length) {
      this.detail.replaceChildren(el("p.hint", {}, "Choose a completion to see it token by token; ⇆ puts a second one beside it."));
      this.detail.parentNode.classList.remove("compared");
      return;
    }
    const group = groupKey(this.opened[0]);
    colours.largest = Math.max(...this.known.filter((each) => groupKey(each) === group).map((each) => Math.abs(each.advantage || 0)), ...this.opened.flatMap((each) => (each.advantages || []).map((one) => Math.abs(one || 0))), 1e-9);
    const views = this.opened.map((completion) => this.one(completion));
    const recolour = () => views.forEach((view) => view.recolour && view.recolour());
    this.detail.replaceChildren(el("div.detail-head", {}, this.isWorst() && el("strong.why-open", {}, "The lowest reward"), this.opened.some((completion) => completion.tokens) && modePicker(recolour), el("button.quiet", { "aria-label": "Close", onclick: () => { this.opened = []; this.chosen = false; this.closed = true; this.show(); } }, "✕")), el("div.pair", {}, views)); // prettier-ignore
    this.detail.parentNode.classList.toggle("compared", this.opened.length > 1);
  },
  one(completion) {
    const facts = [
      ["step", completion.step], ["prompt", `#${completion.position}`], ["completion", completion.index], ["reward", fmt(completion.reward)],
      ...Object.entries(completion.rewards || {}).map(([name, reward]) => [name, reward === null ? "abstained" : fmt(reward)]),
      ["advantage", fmt(completion.advantage)], ["tokens", `${completion.length ?? "–"}${completion.cut ? "+" : ""}`], ["end", completion.finish || "–"],
      ...Object.entries(completion.extra || {}).slice(0, 12).map(([name, extra]) => [name, short(typeof extra === "string" ? extra : JSON.stringify(extra), 200)]),
    ]; // prettier-ignore
    const tokens = tokenView(completion);
    const prompt = typeof completion.promptValue === "string" ? el("div.text", {}, completion.promptValue) : turns(completion.promptValue || []);
    const found = el(
      "article.one",
      {},
      el("dl.chips", {}, facts.map(([name, fact]) => el("div", {}, el("dt", {}, name), el("dd", {}, fact)))),
      completion.images && el("p", {}, completion.images.map((image) => el("img", { src: image, alt: "An image of the prompt or of a tool's answer" }))),
      el("details", {}, el("summary", {}, "Prompt: ", short(promptText(completion.promptValue), 90)), prompt),
      completion.session && el("details", { open: true }, el("summary", {}, "Session: ", plural(completion.session.length, "answer")), sessionTree(completion.session)),
      completion.messages && el("details", { open: !completion.session }, el("summary", {}, plural(completion.messages.length, "message")), turns(completion.messages)),
      completion.messages && el("h4", {}, "Tokens"),
      tokens,
    );
    found.recolour = tokens.recolour;
    return found;
  },
};

const groupKey = (completion) => `${completion.step} ${completion.purpose} ${completion.position}`;

// A line of a text: around what was searched for, where it is in there.
function snippet(text, wanted) {
  const flat = text.slice(0, 20000).replace(/\s+/g, " ");
  const at = wanted ? flat.toLowerCase().indexOf(wanted.toLowerCase()) : -1;
  if (at < 0) return short(flat, 180) || "(empty)";
  const from = Math.max(0, at - 60);
  return [from ? "…" : "", flat.slice(from, at), el("mark", {}, flat.slice(at, at + wanted.length)), short(flat.slice(at + wanted.length), 120)];
}
