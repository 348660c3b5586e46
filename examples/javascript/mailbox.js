// Mail between agents, with nats.js alone. Beside a running service: npm ci && node mailbox.js [URL]
import { connect, headers } from "@nats-io/transport-node";

const LEASE = 30_000; // milliseconds
const nats = await connect({ servers: process.argv[2] ?? "nats://127.0.0.1:4222" }); // also user, pass, token, tls: {}

async function ask(subject, body, options) {
  const data = typeof body === "string" ? body : JSON.stringify(body);
  const reply = (await nats.request(`$mq9.AI.${subject}`, data, { timeout: 10_000, ...options })).json();
  if (reply.error) throw Object.assign(new Error(reply.error), { code: reply.error_code });
  return reply;
}

async function send(address, text, fields = {}) {
  const sent = headers();
  for (const [name, value] of Object.entries(fields)) sent.set(`mq9-${name}`, value);
  return ask(`MSG.SEND.${address}`, text, { headers: sent });
}

// A leased message goes to one worker of the group: ACK when its work is done, NACK when it failed, EXTEND meanwhile.
async function consume(address, group, work) {
  const config = { num_msgs: 1, max_wait_ms: 4000, ack_wait_ms: LEASE };
  const request = { group_name: group, deliver: "earliest", encoding: "utf8", config };
  for (const message of (await ask(`MSG.FETCH.${address}`, request)).messages) {
    const tell = (verb, more) => ask(`MSG.${verb}.${address}`, { group_name: group, msg_ids: [message.msg_id], ...more });
    const extending = setInterval(() => tell("EXTEND", { ack_wait_ms: LEASE }).catch(console.error), LEASE / 3);
    await work(message).then(() => tell("ACK"), () => tell("NACK", { delay_ms: 1000 }));
    clearInterval(extending);
  }
}

const { mail_address: inbox } = await ask("MAILBOX.CREATE", { ttl: 3600 }); // an address nobody can guess
await ask("AGENT.REGISTER", { mailbox: inbox, name: "Tides", description: "Tells high and low water for harbours." });
const [agent] = (await ask("AGENT.DISCOVER", { semantic: "When is high water in the harbour?" })).agents;
await send(agent.mailbox, "Is there water at noon?");
await send(agent.mailbox, "Storm at six!", { priority: "urgent" });
const print = async (message) => console.log(message.priority, message.payload);
for (let done = 0; done < 2; done++) await consume(inbox, "workers", print);
await ask("AGENT.UNREGISTER", { mailbox: inbox });
await nats.drain();
