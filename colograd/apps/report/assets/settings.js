// Settings: what each run was, and its knobs; of several runs those that differ.

const settingText = (value) => (value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value));

const settingsView = {
  name: "settings",
  title: "Settings",
  kind: null,
  text: "",
  build(container) {
    this.kind ??= several() ? "different" : runs.some((run) => (run.run.changed || []).length) ? "changed" : "all";
    this.rows = el("div");
    const kinds = [...(several() ? [["different", "that differ between the runs"]] : []), ["changed", "that aren't at their defaults"], ["all", "all"]];
    add(
      container,
      card("Settings", null, el("div.filters", {}, select("Which settings", kinds, this.kind, (chosen) => { this.kind = chosen; this.list(); }), el("input", { type: "search", placeholder: "Search", "aria-label": "Search settings", value: this.text, oninput: (event) => { this.text = event.target.value; this.list(); } })), this.rows),
      card(several() ? "Runs" : "Run", null, this.facts()),
    ); // prettier-ignore
    this.list();
  },
  facts() {
    const versions = (run) => Object.entries(run.run.versions || {}).map(([name, version]) => `${name} ${version}`).join(", ");
    const facts = [
      ["Model", (run) => run.run.model], ["Datasets", (run) => (run.run.datasets || []).join(", ")],
      ["Rewards", (run) => (run.run.reward_names || []).map((name, place) => `${name} × ${fmt((run.run.reward_weights || [])[place] ?? 1)}`).join(", ")],
      ["Parameters", (run) => run.run.parameters && `${fmt(run.run.parameters)}, ${fmt(run.run.trained_parameters)} trained`],
      ["Device", (run) => run.run.device && `${run.run.device}, ${plural(run.run.ranks || 1, "rank")}`], ["Versions", versions],
      ["Command", (run) => run.run.command && el("code", {}, run.run.command)],
      ["Starts", (run) => run.starts.map((start) => (start.resumed ? `resumed at ${start.step}` : `at ${start.step}`)).join(", ")],
      ["State", (run) => run.status.state + (run.status.error ? `: ${run.status.error}` : "")],
    ]; // prettier-ignore
    const rows = facts.filter(([, fact]) => runs.some((run) => fact(run))).map(([name, fact]) => [el("td.name", {}, name), ...runs.map((run) => fact(run) || "–")]);
    return table(several() ? ["", ...runs.map((run) => run.name)] : ["", ""], rows, { className: "facts" });
  },
  list() {
    const changed = new Set(runs.flatMap((run) => run.run.changed || []));
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.run.settings || {})))].sort((a, b) => changed.has(b) - changed.has(a) || (a < b ? -1 : 1));
    const texts = (name) => runs.map((run) => settingText((run.run.settings || {})[name]));
    const shown = names.filter((name) => {
      if (this.kind === "changed" && !changed.has(name)) return false;
      if (this.kind === "different" && new Set(texts(name)).size < 2) return false;
      return !this.text || `${name} ${texts(name).join(" ")}`.toLowerCase().includes(this.text.toLowerCase());
    });
    if (!names.length) {
      this.rows.replaceChildren(el("p.hint", {}, "No settings were recorded."));
      return;
    }
    const rows = shown.map((name) => el("tr", { className: changed.has(name) ? "changed" : "" }, el("td.name", {}, el("code", {}, name)), texts(name).map((text) => el("td", {}, el("code", {}, short(text, 400))))));
    this.rows.replaceChildren(el("p.hint.count", {}, `${plural(shown.length, "setting")} of ${names.length}. Those that aren't at their defaults come first, in bold.`), table(["Name", ...runs.map((run) => run.name)], rows, { className: "settings" }));
  },
  update() {},
};
