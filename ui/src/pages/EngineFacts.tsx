/** The engine as it is now: its weights, its load, its pauses, and each of its workers. */

import { useFresh, useGet } from "../api/hooks";
import { Badge, type Tone } from "../components/Badge";
import { Facts } from "../components/Facts";
import { SafeLine } from "../components/SafeText";
import { Await } from "../components/Status";
import type { Answer } from "../api/client";
import { count, seconds, share } from "../text/format";

type Engine = Answer<"/engine">;

const WORKER: Readonly<Record<string, Tone>> = {
  joining: "busy", serving: "good", draining: "busy", fenced: "warn", asleep: "calm", down: "bad",
};

export function EngineFacts() {
  const engine = useGet("/engine");
  useFresh(engine);
  return (
    <section aria-label="Engine">
      <h2>Engine</h2>
      <Await of={engine}>{(found) => <Now engine={found} />}</Await>
    </section>
  );
}

function Now({ engine }: { engine: Engine }) {
  const workers = engine.workers ?? [];
  return (
    <>
      <Facts
        facts={[
          ["State", stateOf(engine)],
          ["Model", <SafeLine text={engine.model_name} />],
          ["Weight version", engine.weight_version === null ? null : <SafeLine text={engine.weight_version} />],
          ["Versions served", count(engine.versions)],
          ["Calls on it", count(engine.running_calls)],
          ["Calls waiting", count(engine.waiting_calls)],
          ["Says", engine.detail ? <SafeLine text={engine.detail} /> : null],
        ]}
      />
      {workers.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Engine workers">
          <table class="numbers">
            <thead>
              <tr>
                <th scope="col">Worker</th>
                <th scope="col">Status</th>
                <th scope="col">Weight version</th>
                <th scope="col" class="numeric">Calls</th>
                <th scope="col" class="numeric">Cache used</th>
                <th scope="col">Why not</th>
              </tr>
            </thead>
            <tbody>
              {workers.map((worker) => (
                <tr key={worker.worker_id}>
                  <th scope="row"><SafeLine text={worker.worker_id} /></th>
                  <td><Badge tone={WORKER[worker.status] ?? "calm"}>{worker.status}</Badge></td>
                  <td><SafeLine text={worker.weight_version ?? ""} /></td>
                  <td class="numeric">{count(worker.running)} / {count(worker.limit)}</td>
                  <td class="numeric">{share(worker.kv_used)}</td>
                  <td><SafeLine text={worker.detail ?? ""} /></td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </>
  );
}

function stateOf(engine: Engine) {
  if (!engine.ok) return <Badge tone="bad">does not answer</Badge>;
  if (engine.asleep) return <Badge tone="calm">asleep</Badge>;
  if (!engine.paused) return <Badge tone="good">serving</Badge>;
  return <Badge tone="warn">{`paused for ${seconds(engine.paused_s)}`}</Badge>;
}
