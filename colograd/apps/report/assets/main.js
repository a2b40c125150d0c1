// The page's frame: head, alarms, tabs, the step and the smoothing; and what is live.

const VIEWS = [overviewView, timeView, completionsView, groupsView, advisorView, settingsView];

const STATES = { running: "running", waiting: "waiting for its first step", finished: "finished", stopped: "stopped", failed: "failed" };

function head() {
  const title = several() ? `${runs.length} runs side by side` : runs[0].name;
  document.title = `${visible(title)} · Colograd report`;
  const facts = (run) => [run.run.model, (run.run.datasets || []).join(", "), run.run.device, (run.run.ranks || 1) > 1 && plural(run.run.ranks, "rank")].filter(Boolean).join(" · ");
  const box = document.getElementById("head");
  box.replaceChildren();
  add(
    box,
    el("div.title", {}, el("span.brand", {}, "Colograd"), el("h1", {}, title), !several() && stateOf(runs[0]), page.live && el("span.pill", { id: "link", "data-state": "running" }, "live"), el("button.quiet.theme", { title: "Light or dark", "aria-label": "Light or dark", onclick: () => change({ theme: isDark() ? "light" : "dark" }) }, "◐")),
    several() ? el("div.legend", {}, runs.map((run) => el("span", {}, dot(runColour(run.index)), run.name, " ", stateOf(run)))) : el("p.facts-line", {}, facts(runs[0]), progressWords(runs[0])),
    !several() && progressBar(runs[0]),
    runs.filter((run) => run.status.error).map((run) => el("p.error", {}, `${several() ? `${run.name}: ` : ""}${run.status.error}`)),
    alarmStrip(),
  );
}

const stateOf = (run) => el("span.pill", { "data-state": run.status.state }, STATES[run.status.state] || run.status.state);

function progressWords(run) {
  const { step, max_steps: most, begun, seen, state: now } = run.status;
  const passed = isNumber(begun) && isNumber(seen) ? seen - begun : null;
  const words = most ? ` · step ${step} of ${most}` : step ? ` · step ${step}` : "";
  if (now === "running" && most && step && passed) return `${words}, ${duration(passed)} so far, about ${duration((passed / step) * (most - step))} to go`;
  return words + (passed ? `, ${duration(passed)}` : "");
}

function progressBar(run) {
  if (run.status.state !== "running" || !run.status.max_steps) return null;
  return el("progress", { max: run.status.max_steps, value: run.status.step, "aria-label": "Steps done" });
}

const tabs = new Map();
let stepSlider, stepText, alarmCount, main;

function bar() {
  const list = el("div.tabs", { role: "tablist", "aria-label": "Views" });
  for (const view of VIEWS) {
    const tab = el("button", { role: "tab", id: `tab-${view.name}`, "data-view": view.name, "aria-controls": "main", onclick: () => change({ view: view.name }) }, view.title, view === advisorView && [" ", (alarmCount = el("span.badge"))]);
    tabs.set(view.name, tab);
    list.append(tab);
  }
  list.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1 };
    if (!(event.key in moves)) return;
    const names = VIEWS.map((view) => view.name);
    const next = names[(names.indexOf(state.view) + moves[event.key] + names.length) % names.length];
    change({ view: next });
    tabs.get(next).focus();
  });
  stepSlider = el("input", { type: "range", min: 0, max: 0, "aria-label": "Step", oninput: () => change({ step: allSteps()[Number(stepSlider.value)] }) });
  stepText = el("output");
  const go = (by) => {
    const steps = allSteps(), place = steps.indexOf(state.step);
    const next = place < 0 ? (by > 0 ? 0 : steps.length - 1) : Math.max(0, Math.min(steps.length - 1, place + by));
    if (steps.length) change({ step: steps[next] });
  };
  const smoothing = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, id: "smoothing", "aria-label": "Smoothing", oninput: () => change({ smoothing: Number(smoothing.value) }) });
  const box = el("div.tabs-box", {}, list);
  const cue = () => {
    box.dataset.before = list.scrollLeft > 2;
    box.dataset.after = list.scrollLeft + list.clientWidth < list.scrollWidth - 2;
  };
  list.addEventListener("scroll", cue);
  watchWidth(list, cue);
  document.getElementById("bar").append(
    box,
    el("div.controls", {}, el("div.stepper", {}, el("button", { "aria-label": "Step before", onclick: () => go(-1) }, "‹"), stepSlider, el("button", { "aria-label": "Next step", onclick: () => go(1) }, "›"), stepText), el("label.smooth", {}, "Smoothing ", smoothing)),
  );
}

const isDark = () => (state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);

const showTheme = () => (document.documentElement.dataset.theme = isDark() ? "dark" : "light"); // canvases read its colours

function marks() {
  const steps = allSteps();
  stepSlider.max = Math.max(steps.length - 1, 0);
  stepSlider.disabled = steps.length < 2;
  const place = state.step === null ? -1 : steps.indexOf(nearest(steps, state.step));
  stepSlider.value = place < 0 ? steps.length - 1 : place;
  stepText.textContent = state.step === null ? "no step" : `step ${state.step}`;
  const alarms = openAlarms().filter(([, alarm]) => !isNote(alarm));
  alarmCount.hidden = !alarms.length;
  alarmCount.textContent = alarms.length;
  alarmCount.title = plural(alarms.length, "open alarm");
  alarmCount.dataset.severity = alarms.length ? alarms[0][1].severity : "";
  for (const [name, tab] of tabs) {
    tab.setAttribute("aria-selected", String(name === state.view));
    tab.tabIndex = name === state.view ? 0 : -1;
  }
  main.setAttribute("aria-labelledby", `tab-${state.view}`);
}

const current = () => VIEWS.find((view) => view.name === state.view);

function build() {
  forgetCharts();
  tip(null);
  main.replaceChildren();
  main.dataset.view = state.view;
  current().build(main);
}

function update(reasons) {
  if (reasons.has("theme")) {
    showTheme();
    head(); // whose dots have colours of their own
  }
  if (reasons.has("view") || reasons.has("run") || reasons.has("theme")) build();
  else current().update(reasons);
  if (reasons.has("view")) tabs.get(state.view).scrollIntoView({ block: "nearest", inline: "nearest" });
  marks();
}

function foot() {
  const thinned = runs.filter((run) => run.every > 1).map((run) => `${several() ? `${run.name}: ` : ""}each point of a curve is the mean of ${run.every} steps`);
  document.getElementById("foot").replaceChildren(el("p", {}, `Colograd ${page.version}. `, page.live ? "This page is live: it asks the program that serves it, and nobody else. " : "This file asks nobody for anything. ", thinned.join("; "), " Charts by uPlot 1.6.32 (MIT)."));
}

// What is new is drawn where it doesn't take away what somebody is reading.
function arrived(news, reached) {
  const link = document.getElementById("link");
  if (link) {
    link.dataset.state = reached ? "running" : "failed";
    link.textContent = reached ? "live" : "not reached";
  }
  if (!news || news.change === arrived.known) return;
  arrived.known = news.change;
  head();
  foot();
  if (state.view === "completions") {
    if (state.step === null && !completionsView.chosen && !completionsView.filters.all) completionsView.load();
  } else {
    const top = window.scrollY;
    const open = [...main.querySelectorAll("details")].map((each) => each.open);
    build();
    [...main.querySelectorAll("details")].forEach((each, place) => (each.open = open[place] || false));
    window.scrollTo(0, top);
  }
  marks();
}

main = document.getElementById("main");
main.setAttribute("role", "tabpanel");
Object.assign(state, readAddress(VIEWS.map((view) => view.name)));
showTheme();
bar();
head();
build();
marks();
tabs.get(state.view).scrollIntoView({ block: "nearest", inline: "nearest" });
foot();
listeners.push(update);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  showTheme();
  head();
  build();
});
window.addEventListener("hashchange", () => change(readAddress(VIEWS.map((view) => view.name))));
if (page.live) {
  arrived.known = runs[0].change;
  follow(arrived);
}
