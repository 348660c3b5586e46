// A mediator on Credo 0.5, as its users run one: node mediator.mjs FOLDER HTTP_PORT WS_PORT
// Prints an invitation once it is ready; ends with its standard input.
import { join } from "node:path";
import askar from "@credo-ts/askar";
import core from "@credo-ts/core";
import node from "@credo-ts/node";
import native from "@openwallet-foundation/askar-nodejs";

const [folder, http, ws] = process.argv.slice(2);
const agent = new core.Agent({
  config: {
    label: "mediator",
    logger: new core.ConsoleLogger(core.LogLevel.error),
    endpoints: [`http://127.0.0.1:${http}`, `ws://127.0.0.1:${ws}`],
    walletConfig: {
      id: "mediator",
      key: "1".repeat(32),
      keyDerivationMethod: "RAW",
      storage: { type: "sqlite", config: { path: join(folder, "mediator.sqlite") } },
    },
  },
  dependencies: node.agentDependencies,
  modules: {
    askar: new askar.AskarModule({ ariesAskar: native.askar ?? native.ariesAskar }),
    connections: new core.ConnectionsModule({ autoAcceptConnections: true }),
    mediator: new core.MediatorModule({
      autoAcceptMediationRequests: true,
      // By default mail is only queued when it could not be delivered directly; mediators that are run use this one.
      messageForwardingStrategy: "QueueAndLiveModeDelivery",
    }),
  },
});
agent.registerInboundTransport(new node.HttpInboundTransport({ port: Number(http) }));
agent.registerInboundTransport(new node.WsInboundTransport({ port: Number(ws) }));
agent.registerOutboundTransport(new core.HttpOutboundTransport());
agent.registerOutboundTransport(new core.WsOutboundTransport());
process.on("unhandledRejection", (error) => console.error("not caught:", String(error)));
await agent.initialize();
const { outOfBandInvitation } = await agent.oob.createInvitation({ multiUseInvitation: true });
console.log(outOfBandInvitation.toUrl({ domain: `http://127.0.0.1:${http}` }));
process.stdin.on("end", () => process.exit()).resume();
