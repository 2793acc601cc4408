/* A peer that violates MPA, DDP and RDMAP, and checks the module's answers.
 *
 * violating ADDR PORT
 *
 * The peer is a plain TCP socket of this process. It is connected to a queue pair of the same
 * process, with a new connection for each violation. The peer must receive the Terminate that the
 * RFCs require and then a FIN; the program must get a disconnect event, and a completion of its
 * receive with the right status. No octet of the program's memory may change. A valid Write on the
 * first connection shows that the checks detect a change. Exit status: 0 if all checks pass.
 */
#include "frame.h"
#include "pair.h"

#include <sys/time.h>

#define OCTETS 64
#define TIMEOUT 20 /* seconds */

/* RDMAP opcodes (RFC 5040 section 4.4, RFC 7306 section 4.1). */
enum op { WRITE, READ, READ_RESPONSE, SEND, SEND_INV, TERMINATE = 7, ATOMIC = 10, ATOMIC_RESPONSE };

/* A Terminate's layer, type and code (RFC 5040 section 4.8). */
#define PROTECTION(code) (0x0100 | (code))
#define OPERATION(code) (0x0200 | (code))
#define TAGGED(code) (0x1100 | (code))
#define UNTAGGED(code) (0x1200 | (code))
#define MPA(code) (0x2000 | (code))

/* The region that the peer's request refers to: none (an unknown STag), one with all remote rights,
 * one without, and one in another protection domain. */
enum where { UNKNOWN, ALL, LOCAL, FOREIGN, PLACES };

/* Offsets of header fields (of the last octet, if a field is longer): queue number, message
 * sequence number, message offset, and atomic operation. */
#define CHANGED(where, to) .changed = 1, .at = (where), .octet = (to)
enum { DDP_CONTROL = 0, RDMAP_CONTROL = 1, QN = 9, MSN = 13, MO = 17, ATOMIC_OP = 21 };

#define WRAPS INT64_MAX

struct violation {
	const char *name;
	int answer;
	enum op op;
	enum where where;
	int64_t offset;
	int payload;
	/* The fault: octet `at` of the ULPDU is replaced, the ULPDU is cut to `length`, or its CRC is
	 * wrong. */
	int changed, at, octet;
	int cut, length;
	int bad_crc;
	/* The expected status of the receive; 0 if it is flushed. */
	enum ibv_wc_status receive;
};

static const struct violation violations[] = {
	{ "a Write to an unknown STag", TAGGED(0), WRITE, UNKNOWN },
	{ "a Write beyond the end", TAGGED(1), WRITE, ALL, 60 },
	{ "a Write before the start", TAGGED(1), WRITE, ALL, -4 },
	{ "a Write whose offset wraps", TAGGED(3), WRITE, ALL, WRAPS },
	{ "a Write to a region without remote write access", PROTECTION(2), WRITE, LOCAL },
	{ "a Write into another domain", TAGGED(2), WRITE, FOREIGN },
	{ "a Read of an unknown STag", PROTECTION(0), READ, UNKNOWN },
	{ "a Read beyond the end", PROTECTION(1), READ, ALL, 60 },
	{ "a Read whose offset wraps", PROTECTION(4), READ, ALL, WRAPS },
	{ "a Read of a region without remote read access", PROTECTION(2), READ, LOCAL },
	{ "a Read from another domain", PROTECTION(3), READ, FOREIGN },
	{ "a short Read Request", OPERATION(0xff), READ, ALL, .payload = 20 },
	{ "an unsolicited Read Response", OPERATION(6), READ_RESPONSE, ALL },
	{ "an atomic at an unknown STag", PROTECTION(0), ATOMIC, UNKNOWN },
	/* The module never grants peers the right to atomic operations on a region. */
	{ "an atomic without remote atomic access", PROTECTION(2), ATOMIC, ALL },
	{ "an atomic in another domain", PROTECTION(3), ATOMIC, FOREIGN },
	{ "an unknown atomic operation", OPERATION(6), ATOMIC, ALL, CHANGED(ATOMIC_OP, 1) },
	{ "an unsolicited Atomic Response", OPERATION(6), ATOMIC_RESPONSE },
	{ "an invalidation of an unknown STag", PROTECTION(9), SEND_INV, UNKNOWN,
	  .receive = IBV_WC_LOC_ACCESS_ERR },
	{ "an invalidation of a memory region", PROTECTION(9), SEND_INV, ALL,
	  .receive = IBV_WC_LOC_ACCESS_ERR },
	{ "an invalidation in another domain", PROTECTION(9), SEND_INV, FOREIGN,
	  .receive = IBV_WC_LOC_ACCESS_ERR },
	{ "a skipped message number", UNTAGGED(3), SEND, CHANGED(MSN, 2) },
	{ "a repeated message number", UNTAGGED(3), SEND, CHANGED(MSN, 0) },
	{ "an offset in a first segment", UNTAGGED(4), SEND, CHANGED(MO, 8) },
	{ "an unknown queue number", UNTAGGED(1), SEND, CHANGED(QN, 4) },
	{ "a Send on the Read Request queue", OPERATION(6), SEND, CHANGED(QN, 1) },
	{ "an unknown RDMAP opcode", OPERATION(6), SEND, CHANGED(RDMAP_CONTROL, 0x4c) },
	{ "an untagged Write", OPERATION(6), SEND, CHANGED(RDMAP_CONTROL, 0x40) },
	{ "an unknown DDP version", UNTAGGED(6), SEND, CHANGED(DDP_CONTROL, 0x42) },
	{ "an unknown DDP version, tagged", TAGGED(4), WRITE, ALL, CHANGED(DDP_CONTROL, 0xc3) },
	{ "an unknown RDMAP version", OPERATION(5), SEND, CHANGED(RDMAP_CONTROL, 0x83) },
	{ "half a header", MPA(3), SEND, .cut = 1, .length = 4 },
	{ "an empty ULPDU", MPA(3), SEND, .cut = 1 },
	{ "a wrong CRC", MPA(2), WRITE, ALL, .bad_crc = 1 },
	{ "a Send that is too long", UNTAGGED(5), SEND, .payload = OCTETS + 1,
	  .receive = IBV_WC_LOC_LEN_ERR },
};

static const struct violation valid = { "a valid Write", -1, WRITE, ALL };
static const struct violation empty_write = { "a Write of nothing", -1, WRITE, ALL, .cut = 1,
					.length = 14 };

static unsigned char memory[PLACES][OCTETS] __attribute__((aligned(8)));
static unsigned char received[OCTETS]; /* The buffer of the program's receive. */

/* ---- the peer ---- */

static uint32_t crc32c(const unsigned char *octets, size_t n)
{
	uint32_t sum = ~0u;

	while (n--) {
		sum ^= *octets++;
		for (int bit = 0; bit < 8; bit++)
			sum = sum >> 1 ^ (sum & 1 ? 0x82f63b78 : 0);
	}
	return ~sum;
}

static unsigned char *put(unsigned char *to, uint64_t value, int octets)
{
	while (octets--)
		*to++ = (unsigned char)(value >> 8 * octets);
	return to;
}

/* Writes the header of a Read Request or an Atomic Request. Its sink has an unknown STag. */
static unsigned char *request(unsigned char *to, enum op op, uint32_t stag, uint64_t offset)
{
	if (op == READ) {
		to = put(put(put(to, 0x11223300, 4), 0, 8), 8, 4);
		return put(put(to, stag, 4), offset, 8);
	}
	to = put(put(put(put(to, 0, 4), 1, 4), stag, 4), offset, 8);
	return put(put(put(put(to, 1, 8), ~0ull, 8), 0, 8), ~0ull, 8);
}

/* Writes the ULPDU. Returns its length. */
static size_t ulpdu(const struct violation *what, unsigned char *to, uint32_t stag, uint64_t offset)
{
	static const unsigned char queues[] = { [READ] = 1, [ATOMIC] = 1, [ATOMIC_RESPONSE] = 3 };
	int tagged = what->op == WRITE || what->op == READ_RESPONSE;
	unsigned char *end = put(put(to, tagged ? 0xc1 : 0x41, 1), 0x40 | what->op, 1);
	unsigned char *body;

	if (tagged)
		end = put(put(end, stag, 4), offset, 8);
	else
		end = put(put(put(put(end, what->op == SEND_INV ? stag : 0, 4), queues[what->op],
				  4), 1, 4), 0, 4);
	body = end;
	if (what->op == READ || what->op == ATOMIC) {
		end = request(end, what->op, stag, offset);
	} else {
		memset(end, 7, OCTETS + 1);
		end += what->op == ATOMIC_RESPONSE ? 12 : 8;
	}
	if (what->payload)
		end = body + what->payload;
	if (what->changed)
		to[what->at] = (unsigned char)what->octet;
	return what->cut ? (size_t)what->length : (size_t)(end - to);
}

static void send_fpdu(int s, const struct violation *what, uint32_t stag, uint64_t offset)
{
	unsigned char fpdu[256] = {};
	size_t octets = ulpdu(what, fpdu + 2, stag, offset), padded = (2 + octets + 3) & ~(size_t)3;
	uint32_t sum;

	put(fpdu, octets, 2);
	memset(fpdu + 2 + octets, 0, padded - 2 - octets);
	sum = crc32c(fpdu, padded) ^ (what->bad_crc ? 0x10 : 0);
	/* The CRC is sent with its lowest octet first (RFC 5044 section 4.4). */
	for (int i = 0; i < 4; i++)
		fpdu[padded + i] = (unsigned char)(sum >> 8 * i);
	fail_if(send(s, fpdu, padded + 4, 0) != (ssize_t)padded + 4, "sending");
}

/* Reads a Terminate and then the FIN. Returns the Terminate's layer, type and code. */
static int read_terminate(int s)
{
	unsigned char fpdu[2048];
	size_t octets, padded;
	uint32_t sum = 0;

	fail_if(recv(s, fpdu, 2, MSG_WAITALL) != 2, "a Terminate");
	octets = (size_t)(fpdu[0] << 8 | fpdu[1]);
	padded = (2 + octets + 3) & ~(size_t)3;
	fail_if(octets < 20 || padded + 4 > sizeof fpdu, "the length of a Terminate");
	fail_if(recv(s, fpdu + 2, padded + 2, MSG_WAITALL) != (ssize_t)padded + 2,
		"the rest of a Terminate");
	for (int i = 4; i--;)
		sum = sum << 8 | fpdu[padded + i];
	fail_if(sum != crc32c(fpdu, padded), "the CRC of a Terminate");
	fail_if(fpdu[2] != 0x41 || fpdu[3] != (0x40 | TERMINATE) || fpdu[11] != 2,
		"the header of a Terminate");
	fail_if(recv(s, fpdu + padded + 4, 1, 0) != 0, "no FIN after the Terminate");
	return fpdu[20] << 8 | fpdu[21];
}

/* Connects over TCP and sends an MPA request of revision 1 with CRC. */
static int connect_peer(const struct sockaddr_in *address)
{
	struct frame frame = { .key = "MPA ID Req Frame", .flags = 0x40, .revision = 1 };
	struct timeval timeout = { .tv_sec = TIMEOUT };
	int s = socket(AF_INET, SOCK_STREAM, 0);

	setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
	fail_if(connect(s, (const struct sockaddr *)address, sizeof *address), "connecting");
	fail_if(send(s, &frame, HEADER_LEN, 0) != HEADER_LEN, "a request");
	return s;
}

/* ---- the program ---- */

struct program {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *listener, *id;
	struct ibv_cq *cq;
	struct ibv_pd *foreign;
	struct ibv_mr *regions[PLACES], *received;
	int wrong; /* Number of wrong Terminates and receive statuses. */
};

/* Accepts the connection: creates the queue pair and the regions, and posts one receive. */
static void accept_peer(struct program *program)
{
	int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
		IBV_ACCESS_REMOTE_ATOMIC;
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4 };
	struct ibv_recv_wr wr = { .wr_id = 5, .num_sge = 1 }, *bad;
	struct ibv_sge sge;

	program->id = event(program->channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	program->cq = ibv_create_cq(program->id->verbs, 4, NULL, NULL, 0);
	fail_if(!program->cq, "a completion queue");
	attr.send_cq = attr.recv_cq = program->cq;
	fail_if(rdma_create_qp(program->id, NULL, &attr), "a queue pair");
	program->foreign = ibv_alloc_pd(program->id->verbs);
	fail_if(!program->foreign, "a protection domain");
	program->regions[ALL] = ibv_reg_mr(program->id->qp->pd, memory[ALL], OCTETS, rights);
	program->regions[LOCAL] = ibv_reg_mr(program->id->qp->pd, memory[LOCAL], OCTETS,
					     IBV_ACCESS_LOCAL_WRITE);
	program->regions[FOREIGN] = ibv_reg_mr(program->foreign, memory[FOREIGN], OCTETS, rights);
	program->received = ibv_reg_mr(program->id->qp->pd, received, OCTETS,
				       IBV_ACCESS_LOCAL_WRITE);
	fail_if(!program->regions[ALL] || !program->regions[LOCAL] || !program->regions[FOREIGN] ||
		!program->received, "the regions");
	sge = (struct ibv_sge){ (uintptr_t)received, OCTETS, program->received->lkey };
	wr.sg_list = &sge;
	fail_if(ibv_post_recv(program->id->qp, &wr, &bad) || rdma_accept(program->id, &param),
		"accepting");
	event(program->channel, RDMA_CM_EVENT_ESTABLISHED);
}

static void expect_receive(struct program *program, enum ibv_wc_status status)
{
	struct ibv_wc wc = {};
	int n = 0;

	for (int i = 0; !n && i < TIMEOUT * 1000; i++) {
		n = ibv_poll_cq(program->cq, 1, &wc);
		if (!n)
			usleep(1000);
	}
	fail_if(n != 1 || wc.wr_id != 5, "a completion");
	if (wc.status != status) {
		printf("wrong status of the receive: %s\n",
		       ibv_wc_status_str(wc.status));
		program->wrong++;
	}
}

static void destroy_connection(struct program *program)
{
	rdma_destroy_qp(program->id);
	for (enum where i = ALL; i < PLACES; i++)
		fail_if(ibv_dereg_mr(program->regions[i]), "deregistering a region");
	fail_if(ibv_dereg_mr(program->received) || ibv_dealloc_pd(program->foreign) ||
		ibv_destroy_cq(program->cq) || rdma_destroy_id(program->id),
			"destroying the program's connection");
}

static uint64_t offset_of(const struct violation *what)
{
	if (what->offset == WRAPS)
		return UINT64_MAX - 3;
	return what->where == UNKNOWN ? 0 : (uintptr_t)memory[what->where] + (uint64_t)what->offset;
}

static void run_violation(struct program *program, const struct sockaddr_in *address,
		const struct violation *what)
{
	struct frame frame;
	uint32_t stag;
	int s = connect_peer(address);

	accept_peer(program);
	fail_if(read_frame(s, &frame) || memcmp(frame.key, "MPA ID Rep Frame", sizeof frame.key) ||
		!(frame.flags & 0x40), "the reply");
	stag = what->where == UNKNOWN ? 0x12345678 : program->regions[what->where]->rkey;
	/* Before a responder has received a whole FPDU it may send nothing, not even a Terminate
	 * (RFC 5044 section 7.1.2). */
	if (what->bad_crc)
		send_fpdu(s, &empty_write, stag, offset_of(&empty_write));
	send_fpdu(s, what, stag, offset_of(what));
	if (what == &valid) {
		for (int i = 0; *(volatile unsigned char *)memory[ALL] != 7 &&
		     i < TIMEOUT * 1000; i++)
			usleep(1000);
		fail_if(memory[ALL][0] != 7 || memory[ALL][7] != 7 || memory[ALL][8],
			"the valid Write has not changed exactly its 8 octets");
		memset(memory, 0, sizeof memory);
	} else {
		int answer = read_terminate(s);

		printf("%s: %04x%s\n", what->name, answer,
		       answer == what->answer ? "" : ", which is wrong");
		program->wrong += answer != what->answer;
	}
	close(s);
	event(program->channel, RDMA_CM_EVENT_DISCONNECTED);
	expect_receive(program, what->receive ? what->receive : IBV_WC_WR_FLUSH_ERR);
	for (size_t i = 0; i < sizeof memory; i++)
		fail_if(memory[i / OCTETS][i % OCTETS], "the program's memory has changed");
	destroy_connection(program);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	struct program program = { .channel = rdma_create_event_channel() };

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc != 3 || inet_pton(AF_INET, argv[1], &address.sin_addr) != 1) {
		fprintf(stderr, "usage: violating ADDR PORT\n");
		return 2;
	}
	address.sin_port = htons((unsigned short)atoi(argv[2]));
	fail_if(!program.channel || rdma_create_id(program.channel, &program.listener, NULL,
						   RDMA_PS_TCP) ||
			rdma_bind_addr(program.listener, (struct sockaddr *)&address) ||
				rdma_listen(program.listener, 4),
		"listening");
	run_violation(&program, &address, &valid);
	for (size_t i = 0; i < sizeof violations / sizeof *violations; i++)
		run_violation(&program, &address, &violations[i]);
	fail_if(rdma_destroy_id(program.listener), "destroying the listener");
	rdma_destroy_event_channel(program.channel);
	fail_if(program.wrong, "some answers were wrong");
	printf("%zu violations were answered correctly\n", sizeof violations / sizeof *violations);
	return 0;
}
