// Advisor: what the run's own rules saw, why it matters, and which keys to change.

const SEVERITIES = ["severe", "warning", "note"];
const bySeverity = (entries) => entries.sort(([, a], [, b]) => SEVERITIES.indexOf(a.severity) - SEVERITIES.indexOf(b.severity) || b.step - a.step);
const isOver = (alarm) => isNumber(alarm.until);
// A note says that all is well: it is shown, and counted nowhere.
const isNote = (alarm) => alarm.severity === "note";
const openAlarms = () => bySeverity(runs.flatMap((run) => run.alarms.filter((alarm) => !isOver(alarm)).map((alarm) => [run, alarm])));

const ruleName = (rule) => (rule || "alarm").replace(/[-_]/g, " ").replace(/^./, (first) => first.toUpperCase());

function alarmLine(run, alarm) {
  return el(
    "button.alarm-line",
    { "data-severity": alarm.severity, onclick: () => change({ view: "advisor", step: alarm.step, run: run.index }) },
    el("span.icon", { "aria-hidden": "true" }, isNote(alarm) ? "✓" : "!"),
    el("strong", {}, ruleName(alarm.rule)),
    ` ${several() ? `${run.name}, ` : ""}step ${alarm.step}: `,
    alarm.seen,
  );
}

const AT_TOP = 4;

function alarmStrip() {
  const alarms = openAlarms();
  if (!alarms.length) return null;
  const more = alarms.length - AT_TOP;
  return el("section.alarms", { "aria-label": "Alarms" }, alarms.slice(0, AT_TOP).map(([run, alarm]) => alarmLine(run, alarm)), more > 0 && el("button.quiet", { onclick: () => change({ view: "advisor" }) }, `and ${more} more`));
}

function alarmCard(run, alarm) {
  const source = /^https?:\/\//.test(alarm.source) ? el("a", { href: alarm.source, target: "_blank", rel: "noopener noreferrer" }, alarm.source) : alarm.source;
  return el(
    "article.card.alarm",
    { "data-severity": alarm.severity, "data-over": isOver(alarm) || undefined },
    el("div.card-head", {}, el("h3", {}, ruleName(alarm.rule)), el("span.pill", {}, alarm.severity), several() && el("span.pill", {}, run.name), el("button", { onclick: () => change({ step: alarm.step, view: "overview", run: run.index }) }, `Step ${alarm.step}`), isOver(alarm) && el("span.pill.calm", {}, `over since step ${alarm.until}`)),
    el("dl.why", {}, el("dt", {}, "Seen"), el("dd", {}, alarm.seen), el("dt", {}, "Why it matters"), el("dd", {}, alarm.why), el("dt", {}, "What to change"), el("dd", {}, alarm.remedy), alarm.source && [el("dt", {}, "Source"), el("dd", {}, source)]),
  );
}

const advisorView = {
  name: "advisor",
  title: "Advisor",
  build(container) {
    const all = runs.flatMap((run) => run.alarms.map((alarm) => [run, alarm]));
    const now = openAlarms(), past = bySeverity(all.filter(([, alarm]) => isOver(alarm)));
    const recorded = runs.some((run) => run.status.recorded);
    if (all.every(([, alarm]) => isNote(alarm))) add(container, el("section.card", {}, el("p", {}, recorded ? "No alarm was raised: no rule of the advisor saw anything wrong." : "This run recorded no events, so no rule of the advisor looked at it: train with report: true.")));
    add(container, now.map(([run, alarm]) => alarmCard(run, alarm)), past.length > 0 && el("h2", {}, "Over"), past.map(([run, alarm]) => alarmCard(run, alarm)));
  },
  update() {},
};
