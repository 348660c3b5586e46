// How a wallet is made with Credo 0.5.
import askar from "@credo-ts/askar";
import core from "@credo-ts/core";
import node from "@credo-ts/node";
import native from "@openwallet-foundation/askar-nodejs";

export const { ConsoleLogger: Logger, LogLevel, MediatorPickupStrategy: strategies } = core;
export const MESSAGE = "BasicMessageStateChanged";
export const didcomm = (agent) => agent;

export function make({ label, store: { path, id, key }, mediationRecipient, connections, logger }) {
  const agent = new core.Agent({
    config: {
      label,
      logger,
      walletConfig: { id, key, keyDerivationMethod: "RAW", storage: { type: "sqlite", config: { path } } },
    },
    dependencies: node.agentDependencies,
    modules: {
      askar: new askar.AskarModule({ ariesAskar: native.askar ?? native.ariesAskar }),
      mediationRecipient: new core.MediationRecipientModule(mediationRecipient),
      connections: new core.ConnectionsModule(connections),
    },
  });
  agent.registerOutboundTransport(new core.WsOutboundTransport());
  agent.registerOutboundTransport(new core.HttpOutboundTransport());
  return agent;
}
