// Wallets on the Identus SDK, in one process. Takes commands on stdin and answers on stdout as credo/wallet.mjs does.
import { existsSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { createInterface } from "node:readline";
import SDK from "@hyperledger/identus-sdk";
import { WebSocket } from "ws";

globalThis.WebSocket ??= WebSocket; // Node has one of its own from version 22 on.

const { Agent, Apollo, BasicMessage, Domain, ListenerKey, Pluto } = SDK;
const POLLING_INTERVAL = 500; // ms; by default 5 s
const LONG = 1000;
const wallets = new Map();

// The SDK prints what it does; answers alone go to stdout.
console.log = console.info = console.debug = console.error;

const print = (value) => process.stdout.write(JSON.stringify(value) + "\n");
// Long texts are told by their length.
const told = (text) => (text.length > LONG ? `${text.length} times ${text[0]}` : text);

// The SDK's storage, in a file; it asks for little of its query language.
class Store {
  constructor(path) {
    this.path = path;
    this.tables = existsSync(path) ? JSON.parse(readFileSync(path, "utf8")) : {};
  }
  async query(table, query) {
    const matches = (row, selector) =>
      Object.entries(selector ?? {}).every(([name, value]) => {
        if (name === "$and") return value.every((each) => matches(row, each));
        if (name === "$or") return value.some((each) => matches(row, each));
        return row[name] === value;
      });
    return structuredClone((this.tables[table] ?? []).filter((row) => matches(row, query?.selector)));
  }
  async insert(table, row) {
    (this.tables[table] ??= []).push(structuredClone(row));
    this.save();
  }
  async update(table, row) {
    await this.delete(table, row.uuid);
    await this.insert(table, row);
  }
  async delete(table, uuid) {
    this.tables[table] = (this.tables[table] ?? []).filter((row) => row.uuid !== uuid);
    this.save();
  }
  save() {
    writeFileSync(`${this.path}.new`, JSON.stringify(this.tables));
    renameSync(`${this.path}.new`, this.path);
  }
}

const commands = {
  // Make a wallet, or open one that is there, with a DID whose mail the mediator keeps; return the DID.
  async open({ wallet, folder, mediator, live }) {
    const store = new Store(join(folder, `${wallet}.json`));
    const apollo = new Apollo();
    const pluto = new Pluto(store, apollo);
    const agent = Agent.initialize({ mediatorDID: mediator, apollo, pluto, options: { experiments: { liveMode: live } } });
    agent.addListener(ListenerKey.MESSAGE, (messages) => {
      for (const message of messages) {
        const { content, ...body } = message.body;
        print({ wallet, connection: `${message.from}`, text: content === undefined ? JSON.stringify(body) : told(content) });
      }
    });
    await agent.start();
    const granted = 4; // Connection.State.GRANTED, which the SDK does not export
    if (store.tables.own === undefined && agent.connections.mediator?.state !== granted) throw new Error("no grant");
    if (store.tables.own === undefined) await store.insert("own", { did: `${await agent.createNewPeerDID([], true)}` });
    const did = store.tables.own[0].did;
    wallets.set(wallet, { agent, did });
    await agent.startFetchingMessages(POLLING_INTERVAL);
    return did;
  },

  async write({ wallet, to, texts }) {
    const { agent, did } = wallets.get(wallet);
    for (const text of texts) {
      const message = new BasicMessage({ content: text }, Domain.DID.fromString(did), Domain.DID.fromString(to));
      await agent.send(message.makeMessage());
    }
  },
};

// The SDK's polling ends where the mediator is down.
process.on("unhandledRejection", (error) => console.error("not caught:", String(error)));

for await (const line of createInterface({ input: process.stdin })) {
  const { id, command, ...fields } = JSON.parse(line);
  commands[command](fields).then(
    (value) => print({ id, value: value ?? null }),
    (error) => print({ id, error: error.stack }),
  );
}
process.exit();
