// A whole v2 holder on didcomm-rust, and the third party that writes to it, against a running mediator.
// Arguments: the mediator's out-of-band 2.0 invitation, and the version of coordinate-mediation to speak.
// Prints one JSON line a step; ends with 1 when the mediator does something that it must not.
const assert = require("node:assert/strict");
const crypto = require("node:crypto");
const { Message } = require("didcomm-node");

const PREFIX = "https://didcomm.org/";
const PLAIN = "application/didcomm-plain+json";
const ENCRYPTED = "application/didcomm-encrypted+json";
const ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz";
const WITHIN = 5000;

// did:peer:2, made and read here.

function unbase58(text) {
  let number = 0n;
  for (const character of text) number = number * 58n + BigInt(ALPHABET.indexOf(character));
  const hex = number.toString(16);
  const zeros = text.match(/^1*/)[0].length;
  return Buffer.concat([Buffer.alloc(zeros), Buffer.from(hex.length % 2 ? "0" + hex : hex, "hex")]);
}

function base58(raw) {
  let number = BigInt("0x" + raw.toString("hex"));
  let text = "";
  for (; number > 0n; number /= 58n) text = ALPHABET[Number(number % 58n)] + text;
  return text;
}

function jwkOf(multibase) {
  const raw = unbase58(multibase.slice(1));
  const code = raw.readUInt16BE();
  const key = raw.subarray(2);
  if (code === 0xed01) return { kty: "OKP", crv: "Ed25519", x: key.toString("base64url") };
  if (code === 0xec01) return { kty: "OKP", crv: "X25519", x: key.toString("base64url") };
  if (code === 0x8024) {
    const point = crypto.ECDH.convertKey(key, "prime256v1", null, null, "uncompressed");
    const [x, y] = [point.subarray(1, 33), point.subarray(33)].map((part) => part.toString("base64url"));
    return { kty: "EC", crv: "P-256", x, y };
  }
  return null; // didcomm-rust has no other curves.
}

const LONG = { t: "type", s: "serviceEndpoint", r: "routingKeys", a: "accept", dm: "DIDCommMessaging" };

function expand(value) {
  if (Array.isArray(value)) return value.map(expand);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(
    Object.entries(value).map(([name, inner]) => [LONG[name] ?? name, inner === "dm" ? LONG.dm : expand(inner)]),
  );
}

function resolve(did) {
  assert.match(did, /^did:peer:2\./);
  const document = { id: did, keyAgreement: [], authentication: [], verificationMethod: [], service: [] };
  let place = 0;
  for (const element of did.slice("did:peer:2.".length).split(".")) {
    const [purpose, rest] = [element[0], element.slice(1)];
    if (purpose === "S") {
      const said = expand(JSON.parse(Buffer.from(rest, "base64url")));
      const endpoint = said.serviceEndpoint;
      const flat = typeof endpoint === "string" ? { ...said, uri: endpoint } : endpoint;
      document.service.push({
        id: `${did}#service-${document.service.length}`,
        type: said.type,
        serviceEndpoint: { uri: flat.uri, accept: flat.accept ?? ["didcomm/v2"], routing_keys: flat.routingKeys ?? [] },
      });
      continue;
    }
    place += 1;
    const jwk = jwkOf(rest);
    if (jwk === null) continue;
    const id = `${did}#key-${place}`;
    document.verificationMethod.push({ id, type: "JsonWebKey2020", controller: did, publicKeyJwk: jwk });
    if (purpose === "E") document.keyAgreement.push(id);
    if (purpose === "V") document.authentication.push(id);
  }
  return document;
}

const resolver = { resolve: async (did) => resolve(did) };
const secrets = new Map();
const wallet = {
  get_secret: async (id) => secrets.get(id) ?? null,
  find_secrets: async (ids) => ids.filter((id) => secrets.has(id)),
};

function newDid(uri) {
  const made = [["V", "ed25519", 0xed01], ["E", "x25519", 0xec01]].map(([purpose, kind, code]) => {
    const jwk = crypto.generateKeyPairSync(kind).privateKey.export({ format: "jwk" });
    const raw = Buffer.concat([Buffer.from([code >> 8, code & 255]), Buffer.from(jwk.x, "base64url")]);
    return { jwk, element: `.${purpose}z${base58(raw)}` };
  });
  const service = uri && { t: "dm", s: { uri, a: ["didcomm/v2"] } };
  const end = service ? ".S" + Buffer.from(JSON.stringify(service)).toString("base64url") : "";
  const did = "did:peer:2" + made.map(({ element }) => element).join("") + end;
  made.forEach(({ jwk }, at) => {
    const id = `${did}#key-${at + 1}`;
    secrets.set(id, { id, type: "JsonWebKey2020", privateKeyJwk: jwk });
  });
  return did;
}

// Talking.

const say = (step, fields = {}) => process.stdout.write(JSON.stringify({ step, ...fields }) + "\n");
const write = (type, body, headers = {}) => ({ id: crypto.randomUUID(), typ: PLAIN, type: PREFIX + type, body, ...headers });

async function pack(message, to, from) {
  const addressed = { ...message, to: [to], ...(from ? { from } : {}) };
  const [text] = await new Message(addressed).pack_encrypted(to, from, null, resolver, wallet, { forward: false });
  return text;
}

async function unpack(text, from) {
  const [message, metadata] = await Message.unpack(text, resolver, wallet, {});
  assert.ok(metadata.encrypted && metadata.authenticated, "an answer that is not authenticated");
  const plain = message.as_value();
  assert.equal(plain.from, from);
  assert.equal(metadata.encrypted_from_kid.split("#")[0], from);
  return plain;
}

async function post(url, text) {
  const answer = await fetch(url, { method: "POST", headers: { "Content-Type": ENCRYPTED }, body: text });
  const body = await answer.text();
  assert.ok(answer.status >= 200 && answer.status < 300, `HTTP ${answer.status}: ${body}`);
  if (body) assert.match(answer.headers.get("content-type"), /^application\/didcomm-encrypted\+json/);
  return body;
}

class Socket {
  constructor(url) {
    this.came = [];
    this.wanted = [];
    this.socket = new WebSocket(url);
    this.socket.binaryType = "arraybuffer";
    this.socket.onmessage = ({ data }) => {
      const text = typeof data === "string" ? data : Buffer.from(data).toString();
      const next = this.wanted.shift();
      if (next) next(text);
      else this.came.push(text);
    };
    this.opened = new Promise((done, failed) => {
      this.socket.onopen = done;
      this.socket.onerror = () => failed(new Error("the socket does not open"));
    });
  }

  async next() {
    if (this.came.length) return this.came.shift();
    const late = AbortSignal.timeout(WITHIN);
    return new Promise((done, failed) => {
      this.wanted.push(done);
      late.onabort = () => failed(new Error("nothing came on the socket in time"));
    });
  }
}

// The life of a holder.

async function main(invitation, version) {
  const { from: mediator, id: pthid } = JSON.parse(
    Buffer.from(new URL(invitation).searchParams.get("_oob") ?? new URL(invitation).searchParams.get("oob"), "base64url"),
  );
  const uris = resolve(mediator).service.map(({ serviceEndpoint }) => serviceEndpoint.uri);
  const http = uris.find((uri) => uri.startsWith("http"));
  // A mediator whose DID names no WebSocket has it at its HTTP URL.
  const ws = uris.find((uri) => uri.startsWith("ws")) ?? http.replace(/^http/, "ws");
  const me = newDid();

  async function ask(type, body, headers = {}) {
    const question = write(type, body, { return_route: "all", ...headers });
    const answer = await unpack(await post(http, await pack(question, mediator, me)), mediator);
    assert.equal(answer.thid ?? answer.pthid, question.id);
    return { ...answer, name: answer.type.split("/").at(-1) };
  }

  // Mediation.
  const family = `coordinate-mediation/${version}`;
  const grant = await ask(`${family}/mediate-request`, {}, { pthid });
  assert.equal(grant.name, "mediate-grant");
  assert.equal(Array.isArray(grant.body.routing_did), version === "3.0");
  const routing = [grant.body.routing_did].flat()[0];
  say("granted", { routing });
  const [update, query, list, listed] =
    version === "3.0"
      ? ["recipient-update", "recipient-query", "recipient", "dids"]
      : ["keylist-update", "keylist-query", "keylist", "keys"];
  const mine = newDid(routing);
  const updated = await ask(`${family}/${update}`, { updates: [{ recipient_did: mine, action: "add" }] });
  assert.equal(updated.name, `${update}-response`);
  assert.deepEqual(updated.body.updated, [{ recipient_did: mine, action: "add", result: "success" }]);
  const known = await ask(`${family}/${query}`, {});
  assert.equal(known.name, list);
  assert.deepEqual(known.body[listed], [{ recipient_did: mine }]);
  say("registered");

  // Somebody writes to us, and knows nothing but our DID.
  const bob = newDid();
  async function forward(text) {
    const packed = await pack(write("basicmessage/2.0/message", { content: text }), mine, bob);
    const [through] = resolve(mine).service.map(({ serviceEndpoint }) => serviceEndpoint.uri);
    const document = resolve(through);
    const [key] = document.keyAgreement;
    const wrapped = await Message.wrap_in_forward(packed, {}, mine, [key], "A256cbcHs512EcdhEsA256kw", resolver);
    const to = document.service.map(({ serviceEndpoint }) => serviceEndpoint.uri).find((uri) => uri.startsWith("http"));
    assert.equal(await post(to, wrapped), "", "a forward was answered");
  }

  async function read(attachment) {
    const data = attachment.data;
    const text = data.json ? JSON.stringify(data.json) : Buffer.from(data.base64, "base64url").toString();
    return (await unpack(text, bob)).body.content;
  }

  for (let number = 0; number < 3; number += 1) await forward(`mail ${number}`);
  say("forwarded");

  // Pickup 3.0.
  const status = await ask("messagepickup/3.0/status-request", {});
  assert.equal(status.name, "status");
  assert.equal(status.body.message_count, 3);
  assert.equal(status.body.live_delivery, false);
  const delivery = await ask("messagepickup/3.0/delivery-request", { limit: 2 });
  assert.equal(delivery.name, "delivery");
  assert.deepEqual(await Promise.all(delivery.attachments.map(read)), ["mail 0", "mail 1"]);
  const ids = delivery.attachments.map(({ id }) => id);
  const left = await ask("messagepickup/3.0/messages-received", { message_id_list: ids });
  assert.equal(left.name, "status");
  assert.equal(left.body.message_count, 1);
  const rest = await ask("messagepickup/3.0/delivery-request", { limit: 10, recipient_did: mine });
  assert.deepEqual(await Promise.all(rest.attachments.map(read)), ["mail 2"]);
  assert.equal(rest.body.recipient_did, mine);
  await ask("messagepickup/3.0/messages-received", { message_id_list: rest.attachments.map(({ id }) => id) });
  const empty = await ask("messagepickup/3.0/delivery-request", { limit: 10 });
  assert.equal(empty.name, "status");
  assert.equal(empty.body.message_count, 0);
  say("picked up");

  // Not over HTTP.
  const refused = await ask("messagepickup/3.0/live-delivery-change", { live_delivery: true });
  assert.equal(refused.type, `${PREFIX}report-problem/2.0/problem-report`);
  assert.equal(refused.body.code, "e.m.live-mode-not-supported");
  say("refused");

  // Live.
  const socket = new Socket(ws);
  await socket.opened;
  async function over(type, body) {
    const question = write(type, body, { return_route: "all" });
    socket.socket.send(await pack(question, mediator, me));
    const answer = await unpack(await socket.next(), mediator);
    assert.equal(answer.thid, question.id);
    return answer;
  }
  const live = await over("messagepickup/3.0/live-delivery-change", { live_delivery: true });
  assert.equal(live.body.live_delivery, true);
  for (const text of ["live 0", "live 1"]) {
    await forward(text);
    const pushed = await unpack(await socket.next(), mediator);
    assert.equal(pushed.type, `${PREFIX}messagepickup/3.0/delivery`);
    assert.deepEqual(await Promise.all(pushed.attachments.map(read)), [text]);
    const after = await over("messagepickup/3.0/messages-received", {
      message_id_list: pushed.attachments.map(({ id }) => id),
    });
    assert.equal(after.body.message_count, 0);
  }
  say("live");
  socket.socket.close();

  const removed = await ask(`${family}/${update}`, { updates: [{ recipient_did: mine, action: "remove" }] });
  assert.equal(removed.body.updated[0].result, "success");
  await forward("nobody gets this");
  assert.equal((await ask("messagepickup/3.0/status-request", {})).body.message_count, 0);
  say("removed");
}

main(process.argv[2], process.argv[3]).then(
  () => process.exit(0),
  (error) => {
    say("failed", { why: String(error?.stack ?? error?.message ?? error) });
    process.exit(1);
  },
);
