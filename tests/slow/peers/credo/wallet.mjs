// Wallets on Credo, as many as are asked for, in one process: node wallet.mjs 0.5|0.6
// Takes commands on stdin, and answers on stdout: one JSON object a line. {"wallet", "connection", "text"} is a
// message that came; what went wrong in Credo is on stderr.
import { join } from "node:path";
import { createInterface } from "node:readline";

const edition = process.argv[2];
const { LogLevel, Logger, MESSAGE, didcomm, make, strategies } = await import(`./${edition}/edition.mjs`);

const POLLING_INTERVAL = 1000; // ms; by default 5 s. Credo does not wait for one poll to end before the next.
const LONGEST_RECONNECTION = 500; // ms; by default it doubles without end
const wallets = new Map();

const print = (value) => process.stdout.write(JSON.stringify(value) + "\n");

const commands = {
  // Make a wallet, or open one that is there, and have it connect to its mediator and pick up.
  async open({ wallet, folder, invitation, strategy }) {
    const agent = make({
      label: wallet,
      logger: new Logger(LogLevel.error),
      store: { id: wallet, key: "1".repeat(32), path: join(folder, `${wallet}.sqlite`) },
      connections: { autoAcceptConnections: true },
      mediationRecipient: {
        mediatorInvitationUrl: invitation,
        mediatorPickupStrategy: strategies[strategy],
        mediatorPollingInterval: POLLING_INTERVAL,
        maximumMediatorReconnectionIntervalMs: LONGEST_RECONNECTION,
      },
    });
    agent.events.on(MESSAGE, ({ payload: { message, basicMessageRecord } }) => {
      if (basicMessageRecord.role !== "receiver") return;
      print({ wallet, connection: basicMessageRecord.connectionId, text: message.content });
    });
    await agent.initialize();
    wallets.set(wallet, didcomm(agent));
  },

  // An invitation for one other wallet.
  async invite({ wallet }) {
    const { outOfBandInvitation } = await wallets.get(wallet).oob.createInvitation();
    return outOfBandInvitation.toUrl({ domain: "https://wallet.example" });
  },

  // Connect to another wallet, and return the connection's id.
  async accept({ wallet, invitation }) {
    const { oob, connections } = wallets.get(wallet);
    const { connectionRecord } = await oob.receiveInvitationFromUrl(invitation, { label: wallet });
    return (await connections.returnWhenIsConnected(connectionRecord.id)).id;
  },

  async write({ wallet, to, texts }) {
    for (const text of texts) await wallets.get(wallet).basicMessages.sendMessage(to, text);
  },
};

// Credo's own timers do not catch what happens while the mediator is down.
process.on("unhandledRejection", (error) => console.error("not caught:", String(error)));

for await (const line of createInterface({ input: process.stdin })) {
  const { id, command, ...fields } = JSON.parse(line);
  commands[command](fields).then(
    (value) => print({ id, value: value ?? null }),
    (error) => print({ id, error: error.stack }),
  );
}
process.exit();
