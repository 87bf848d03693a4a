/** What the graders found, of free JSON: of another version, or of a grader of somebody's own. What is not understood
 * here is shown as it is. The shapes are those of `turnstile/models/evidence.py`. */

import type { ComponentChildren } from "preact";
import { Badge } from "../components/Badge";
import { Facts } from "../components/Facts";
import { Fold } from "../components/Fold";
import { JsonView } from "../components/JsonView";
import { SafeLine, SafeText } from "../components/SafeText";
import { count, reward } from "../text/format";
import { arrayOf, type Json, numberOf, objectOf, textOf } from "../text/json";
import { visibleLine } from "../text/visible";

/** Keys of a grading that are no grader's. */
const OF_ALL = new Set(["summary", "diff", "gate", "not_run", "steps", "step_reward", "not_played", "graders_reward"]);
/** Of a grader's evidence: what is shown in a form of its own, or as a fact. */
const SHOWN = new Set(["failed", "output", "slowest", "votes", "rewards", "errors"]);
const AT_ONCE = 100;
const OPEN = 3;

interface EvidenceProps {
  grading: Json;
  /** The components of the reward, by name. */
  parts: Readonly<Record<string, number>>;
}

export function Evidence({ grading, parts }: EvidenceProps) {
  const gate = objectOf(grading.gate);
  const summary = arrayOf(grading.summary);
  const notRun = arrayOf(grading.not_run);
  const notPlayed = arrayOf(grading.not_played);
  return (
    <>
      {summary.length > 0 && (
        <ul class="grade-summary" aria-label="Summary">
          {summary.slice(0, AT_ONCE).map((line, index) => <li key={index}><SafeLine text={textOf(line)} longest={400} /></li>)}
          {summary.length > AT_ONCE && <li class="calm">… and {count(summary.length - AT_ONCE)} more lines</li>}
        </ul>
      )}
      {Object.keys(gate).length > 0 && (
        <p>
          <Badge tone="warn">gate closed</Badge> <SafeLine text={textOf(gate.component)} /> is {reward(numberOf(gate.value))}, below{" "}
          {reward(numberOf(gate.at_least))}: the reward is {reward(numberOf(gate.reward))}.
        </p>
      )}
      {notRun.length > 0 && <p>Not run after that: <SafeLine text={notRun.map(textOf).join(", ")} longest={400} /></p>}
      {Object.entries(grading).map(([name, found]) => {
        if (OF_ALL.has(name) || found === null || typeof found !== "object" || Array.isArray(found)) return null;
        return <Grader key={name} name={name} found={objectOf(found)} value={parts[name]} />;
      })}
      <Taken diff={objectOf(grading.diff)} />
      {Object.entries(objectOf(grading.steps)).map(([name, step]) => <Step key={name} name={name} step={objectOf(step)} />)}
      {notPlayed.length > 0 && <p>Steps that were not played: <SafeLine text={notPlayed.map(textOf).join(", ")} longest={400} /></p>}
    </>
  );
}

function Step({ name, step }: { name: string; step: Json }) {
  return (
    <section class="grader" aria-label={`Step ${visibleLine(name)}`}>
      <h3>Step <SafeLine text={name} /> <Value of={numberOf(step.reward)} /></h3>
      <Evidence grading={step} parts={{}} />
    </section>
  );
}

function Value({ of }: { of: number | null | undefined }) {
  if (of === null || of === undefined) return null;
  return <Badge tone={of >= 1 ? "good" : of <= 0 ? "bad" : "warn"}>{reward(of)}</Badge>;
}

function Grader({ name, found, value }: { name: string; found: Json; value: number | undefined }) {
  const facts = Object.entries(found).filter(([key, each]) => !SHOWN.has(key) && (each === null || typeof each !== "object"));
  const others = Object.entries(found).filter(([key, each]) => !SHOWN.has(key) && each !== null && typeof each === "object");
  const failed = arrayOf(found.failed).map(objectOf);
  const output = textOf(found.output);
  return (
    <section class="grader" aria-label={`Grader ${visibleLine(name)}`}>
      <h3><SafeLine text={name} /> <Value of={value} /></h3>
      <Facts facts={facts.map(([key, each]) => [key.replaceAll("_", " "), <SafeText inline text={textOf(each)} limit={2_000} />] as const)} />
      {failed.length > 0 && <Failed tests={failed} />}
      {arrayOf(found.errors).length > 0 && <Lines title="Errors" lines={arrayOf(found.errors)} />}
      {arrayOf(found.votes).map((vote, index) => <Vote key={index} number={index + 1} vote={objectOf(vote)} />)}
      {found.rewards !== undefined && <Fold summary="Rewards" open>{() => <JsonView value={found.rewards} />}</Fold>}
      {output && (
        <Fold summary={<>Output <small>{count(output.length)} characters</small></>} open={value !== undefined && value < 1}>
          {() => <SafeText text={output} limit={4_000} />}
        </Fold>
      )}
      {arrayOf(found.slowest).length > 0 && <Fold summary="Slowest tests">{() => <JsonView value={found.slowest} depth={2} />}</Fold>}
      {others.map(([key, each]) => (
        <Fold key={key} summary={<SafeLine text={key.replaceAll("_", " ")} />}>{() => <JsonView value={each} />}</Fold>
      ))}
    </section>
  );
}

function Failed({ tests }: { tests: readonly Json[] }) {
  return (
    <section aria-label="Failed tests">
      <h4>{count(tests.length)} failed</h4>
      <ul class="failed-tests">
        {tests.slice(0, AT_ONCE).map((test, index) => (
          <li key={index}>
            <Fold
              summary={<><Badge tone="bad">{textOf(test.status) || "failed"}</Badge> <SafeLine text={textOf(test.id)} longest={300} /></>}
              open={index < OPEN && textOf(test.message) !== ""}
            >
              {() => (textOf(test.message) ? <SafeText text={textOf(test.message)} limit={4_000} /> : <p class="calm">No message.</p>)}
            </Fold>
          </li>
        ))}
      </ul>
      {tests.length > AT_ONCE && <p class="calm">… and {count(tests.length - AT_ONCE)} more.</p>}
    </section>
  );
}

function Vote({ number, vote }: { number: number; vote: Json }) {
  const reply = textOf(vote.reply);
  const rest = Object.fromEntries(Object.entries(vote).filter(([key]) => key !== "reply"));
  return (
    <Fold summary={<>Vote {number}: {reward(numberOf(vote.value))}</>} open={number === 1}>
      {() => (
        <>
          <SafeText text={reply} limit={4_000} />
          <JsonView value={rest} />
        </>
      )}
    </Fold>
  );
}

/** What of the work was given to the graders, and what was not. */
function Taken({ diff }: { diff: Json }) {
  const left = arrayOf(diff.left_out).map(arrayOf);
  const counts = objectOf(diff.counts);
  const kinds = ["added", "changed", "deleted"].filter((kind) => arrayOf(diff[kind]).length > 0);
  if (Object.keys(diff).length === 0) return null;
  const all = (kind: string, shown: number): number => Math.max(shown, numberOf(counts[kind]) ?? 0);
  return (
    <section class="grader" aria-label="Work given to the graders">
      <h3>Work given to the graders</h3>
      {textOf(diff.refused) && <p><Badge tone="bad">not taken over</Badge> <SafeText inline text={textOf(diff.refused)} limit={2_000} /></p>}
      {kinds.length === 0 && left.length === 0 && !textOf(diff.refused) && <p class="calm">Nothing was changed.</p>}
      {kinds.map((kind) => {
        const paths = arrayOf(diff[kind]);
        return <Lines key={kind} title={`${count(all(kind, paths.length))} ${kind}`} lines={paths} />;
      })}
      {left.length > 0 && (
        <>
          <h4>{count(all("left_out", left.length))} left out</h4>
          <ul class="left-out">
            {left.slice(0, AT_ONCE).map(([path, why], index) => (
              <li key={index}><SafeLine text={textOf(path)} longest={300} />: <SafeLine text={textOf(why)} longest={400} /></li>
            ))}
          </ul>
        </>
      )}
    </section>
  );
}

function Lines({ title, lines }: { title: string; lines: readonly unknown[] }): ComponentChildren {
  return (
    <Fold summary={title} open={lines.length <= 10}>
      {() => (
        <ul>
          {lines.slice(0, AT_ONCE).map((line, index) => <li key={index}><SafeLine text={textOf(line)} longest={300} /></li>)}
          {lines.length > AT_ONCE && <li class="calm">… and {count(lines.length - AT_ONCE)} more</li>}
        </ul>
      )}
    </Fold>
  );
}
