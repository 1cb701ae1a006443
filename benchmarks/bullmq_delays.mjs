// BullMQ's delayed jobs: how late each reaches a worker, and how many a second when many are due
// at one moment. `node bullmq_delays.mjs ORDER.json` prints one JSON object; redis_lateness.py
// writes the order and installs the package.

import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { Queue, Worker } from "bullmq";

const order = JSON.parse(readFileSync(process.argv[2], "utf8"));
const connection = { host: "127.0.0.1", port: order.port };
const now = () => performance.timeOrigin + performance.now();

/** Run *send* against a fresh queue; due and start of each job once *count* have come. */
async function measure(name, count, send) {
  const runs = [];
  const queue = new Queue(name, { connection });
  const worker = new Worker(name, async (job) => void runs.push([job.data.due, now()]), {
    connection,
    concurrency: 100,
    removeOnComplete: { count: 0 },
  });
  await worker.waitUntilReady();
  const lastDue = await send(queue);
  while (runs.length < count && now() < lastDue + order.graceMs) await sleep(20);
  await worker.close();
  await queue.close();
  return runs;
}

const steady = await measure("steady", order.delaysMs.length, async (queue) => {
  const started = now();
  let lastDue = started;
  const adding = [];
  for (const [index, delay] of order.delaysMs.entries()) {
    const wait = started + (index * 1000) / order.perSecond - now();
    if (wait > 1) await sleep(wait);
    // BullMQ counts the delay from its timestamp, which is in whole milliseconds.
    const timestamp = Date.now();
    const due = timestamp + delay;
    lastDue = Math.max(lastDue, due);
    adding.push(queue.add("job", { due }, { timestamp, delay }));
  }
  await Promise.all(adding);
  return lastDue;
});

let moment = 0;
const burst = await measure("burst", order.burst, async (queue) => {
  const timestamp = Date.now();
  moment = timestamp + order.burstMs;
  for (let first = 0; first < order.burst; first += 1000) {
    const length = Math.min(1000, order.burst - first);
    const delay = order.burstMs;
    await queue.addBulk(
      Array.from({ length }, () => ({
        name: "job",
        data: { due: moment },
        opts: { timestamp, delay },
      })),
    );
  }
  return moment;
});

const last = Math.max(...burst.map(([, at]) => at));
console.log(
  JSON.stringify({
    lateMs: steady.map(([due, at]) => at - due),
    perSecond: (burst.length * 1000) / (last - moment),
  }),
);
