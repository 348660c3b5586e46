// nats.js as its users have it, against a running mediator. Argument: the URL of the gateway, before a nats-server with
// JetStream. Prints one JSON line a step; ends with 1 when something is not as it would be against nats-server.
// After the step "leaving" the service is expected to go and to come back.
const assert = require("node:assert/strict");
const { connect, createInbox, headers, Empty, ErrorCode, JSONCodec, StringCodec } = require("nats");

const PREFIX = "$mq9.AI.";
const WITHIN = 10000;
const text = StringCodec();
const json = JSONCodec();

function step(name) {
  console.log(JSON.stringify({ step: name }));
}

function within(promise, what) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`not within ${WITHIN} ms: ${what}`)), WITHIN);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

async function next(messages, count) {
  const got = [];
  for (let n = 0; n < count; n++) {
    const { value, done } = await within(messages.next(), `message ${n + 1} of ${count}`);
    assert(!done, "the subscription is over");
    got.push(value);
  }
  return got;
}

const bodies = async (messages, count) => (await next(messages, count)).map((message) => message.string());

async function ask(client, subject, body = {}, options = {}) {
  const answer = await client.request(PREFIX + subject, json.encode(body), { timeout: WITHIN, ...options });
  const reply = answer.json();
  assert.equal(reply.error, "", subject);
  return reply;
}

async function plain(client, url) {
  const answering = client.subscribe("echo", { queue: "workers", callback: (_, message) => {
    const back = headers();
    back.set("Was", message.headers?.get("Trace") ?? "");
    message.respond(message.data, { headers: back });
  } });
  await client.flush();
  const trace = headers();
  trace.append("Trace", "t 1");
  const big = new Uint8Array(900000).fill(7);
  const answer = await client.request("echo", big, { timeout: WITHIN, headers: trace });
  assert.deepEqual([answer.data.length, answer.headers.get("Was")], [big.length, "t 1"]);
  await assert.rejects(client.request("nobody", Empty, { timeout: WITHIN }), { code: ErrorCode.NoResponders });
  const many = await client.requestMany("echo", Empty, { strategy: "count", maxMessages: 1, maxWait: WITHIN });
  let count = 0;
  for await (const _ of many) count++;
  assert.equal(count, 1);
  const old = await connect({ servers: url, noAsyncTraces: true, reconnect: false });
  const direct = { timeout: WITHIN, noMux: true, reply: createInbox() };
  assert.equal((await old.request("echo", text.encode("x"), direct)).string(), "x");
  const seen = old.subscribe("news.>", { max: 2 });
  await old.flush();
  for (let n = 0; n < 4; n++) client.publish(`news.${n}`);
  await client.flush();
  const heard = [];
  for await (const message of seen) heard.push(message.subject);
  assert.deepEqual(heard, ["news.0", "news.1"]);
  assert((await client.rtt()) >= 0);
  await answering.drain();
  await old.close();
  step("plain");
}

async function streams(client) {
  const manager = await client.jetstreamManager();
  await manager.streams.add({ name: "orders", subjects: ["orders.>"] });
  const stream = client.jetstream();
  for (let n = 0; n < 20; n++) {
    assert.equal((await stream.publish("orders.new", text.encode(`${n}`), { msgID: `${n}` })).seq, n + 1);
  }
  assert.equal((await stream.publish("orders.new", text.encode("0"), { msgID: "0" })).duplicate, true);
  await manager.consumers.add("orders", { durable_name: "till", ack_policy: "explicit" });
  const consumer = await stream.consumers.get("orders", "till");
  const fetched = await consumer.fetch({ max_messages: 20, expires: WITHIN });
  const got = [];
  for await (const message of fetched) {
    got.push(message.string());
    assert(await message.ackAck());
  }
  assert.equal(got.length, 20);
  const values = await stream.views.kv("settings", { history: 3 });
  const watch = (await values.watch())[Symbol.asyncIterator]();
  await values.put("colour", text.encode("red"));
  const revision = await values.update("colour", text.encode("blue"), (await values.get("colour")).revision);
  await assert.rejects(values.update("colour", text.encode("green"), revision - 1));
  assert.deepEqual((await next(watch, 2)).map((entry) => entry.string()), ["red", "blue"]);
  await values.delete("colour");
  assert.equal((await values.get("colour")).operation, "DEL");
  step("streams");
}

async function mail(client, url) {
  const { mail_id: box } = await ask(client, "MAILBOX.CREATE", { ttl: 1800 });
  for (const word of ["low", "normal", "high"]) await ask(client, `MAILBOX.MSG.${box}.${word}`, { word });
  const reader = client.subscribe(`${PREFIX}MAILBOX.MSG.${box}.*`);
  const messages = reader[Symbol.asyncIterator]();
  const stored = await next(messages, 3);
  assert.deepEqual(stored.map((message) => message.json().word), ["high", "normal", "low"]);
  assert.deepEqual(stored.map((message) => message.headers.get("mq9-msg-id")), ["2", "1", "0"]);
  client.publish(`${PREFIX}MAILBOX.MSG.${box}.high`, text.encode("live"));
  assert.deepEqual(await bodies(messages, 1), ["live"]);
  const first = client.subscribe(`${PREFIX}MAILBOX.MSG.${box}.*`, { max: 2 });
  const two = [];
  for await (const message of first) two.push(message.headers.get("mq9-msg-id"));
  assert.deepEqual(two, ["2", "3"]);
  // What one member has had nobody else of the queue gets: it confirms, drains, and says goodbye.
  const member = await connect({ servers: url });
  const share = member.subscribe(`${PREFIX}MAILBOX.MSG.${box}.*`, { queue: "crew" });
  await next(share[Symbol.asyncIterator](), 4);
  await member.flush();
  await member.drain();
  assert(member.isClosed());
  await ask(client, `MAILBOX.MSG.${box}.low`, { word: "after" });
  const crew = client.subscribe(`${PREFIX}MAILBOX.MSG.${box}.*`, { queue: "crew" });
  const [after] = await next(crew[Symbol.asyncIterator](), 1);
  assert.equal(after.headers.get("mq9-msg-id"), "4");
  await next(messages, 1);
  await crew.drain();
  step("mail");
  return [messages, box];
}

async function refusals(url) {
  const client = await connect({ servers: url, reconnect: false });
  for (const subject of [">", "_INBOX.>", `${PREFIX}MAILBOX.MSG.*`]) {
    const refused = new Promise((resolve) => client.subscribe(subject, { callback: (error) => error && resolve(error) }));
    assert.equal((await within(refused, `a refusal of ${subject}`)).code, ErrorCode.PermissionsViolation);
  }
  await client.flush();
  await client.close();
  step("refusals");
}

async function main(url) {
  const client = await connect({ servers: url, name: "nats.js", maxReconnectAttempts: -1, reconnectTimeWait: 50 });
  await plain(client, url);
  await streams(client);
  await refusals(url);
  const [messages, box] = await mail(client, url);
  const back = (async () => {
    for await (const status of client.status()) if (status.type === "reconnect") return;
  })();
  step("leaving");
  await within(back, "the way back");
  // A subscription without a queue begins anew; what was low is not kept over a start.
  assert.deepEqual((await next(messages, 3)).map((message) => message.headers.get("mq9-msg-id")), ["2", "3", "1"]);
  await within((async () => {
    for (;;) {
      try {
        return await ask(client, `MAILBOX.MSG.${box}.low`, { word: "back" });
      } catch (error) {
        if (error.code !== ErrorCode.NoResponders && error.code !== ErrorCode.Timeout) throw error;
      }
    }
  })(), "the service");
  assert.equal((await next(messages, 1))[0].json().word, "back");
  await client.drain();
  step("back");
}

main(process.argv[2]).catch((error) => {
  console.error(error);
  process.exit(1);
});
