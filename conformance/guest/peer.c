/* Opens a connection through librdmacm with given parameters, and executes single operations that
 * may violate rules.
 *
 * peer serve ADDR PORT [NAME=VALUE...]      peer connect ADDR PORT [NAME=VALUE...]
 *
 *   priv=N       octets of private data to send (default 24, which tell where the memory region is)
 *   ird=N ord=N  Reads in flight that we answer, and that we send (default 4, 4)
 *   reject=1     reject the request (serve)
 *   recvs=N      receives posted (default 4), recvlen=N octets each (default 4096)
 *   access=LIST  what the peer may do with the region: r, w, rw or none (default rw)
 *   otherpd=1    the region is in a protection domain of its own
 *   op=NAME[:LEN][,...]  operations, in order: write read send, with the suffixes +stag (a bad
 *                STag), +end (across the end), +low (below the start);
 *                e.g. op=write:64,read+end:32
 *                "wait" instead of a name waits until all operations before it are complete
 *   close=us|peer|exit   which side disconnects (default: the connect side);
 *                exit: the process ends without disconnecting
 *   wait=SEC     longest wait for anything (default 10)
 *   pause=MS     before the first operation (default 100)
 *   stay=MS      before ending the connection (default 100)
 *
 * Prints one line per event and completion, and finally "changed N": the number of changed octets
 * of the region. Exit status: 0 if all steps went as expected, 1 if one failed, 2 for wrong
 * arguments, 3 if the request was rejected.
 */
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define REGION 65536u

/* The start of the private data, in network order: the sender's region. */
struct where {
	uint64_t addr;
	uint32_t stag, len;
	uint64_t mark;
};

static int serving, argc_;
static char **argv_;
static struct rdma_event_channel *channel;
static struct rdma_cm_id *id;
static struct ibv_cq *cq;
static struct ibv_mr *region, *local, *inbox;
static unsigned char memory[REGION], scratch[1 << 20], messages[64 * 65536];
static struct where there;
static long limit;
static unsigned done; /* operations that have completed */

static const char *option(const char *name, const char *otherwise)
{
	size_t n = strlen(name);
	for (int i = 4; i < argc_; i++)
		if (!strncmp(argv_[i], name, n) && argv_[i][n] == '=')
			return argv_[i] + n + 1;
	return otherwise;
}

static long number(const char *name, long otherwise)
{
	const char *text = option(name, NULL);
	return text ? strtol(text, NULL, 0) : otherwise;
}

static void must(int bad, const char *what)
{
	if (bad) {
		printf("failed %s: %s\n", what, strerror(errno));
		exit(1);
	}
}

static long now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Prints the available completions. */
static void completions(void)
{
	struct ibv_wc wc;
	while (cq && ibv_poll_cq(cq, 1, &wc) > 0) {
		printf("wc %lu %s len %u\n", (unsigned long)wc.wr_id, ibv_wc_status_str(wc.status),
		       wc.status ? 0 : wc.byte_len);
		done += wc.wr_id < 1000;
	}
}

/* Returns the next connection event, or NULL after `ms`. Prints completions and asynchronous events
 * meanwhile. */
static struct rdma_cm_event *event(long ms)
{
	long end = now() + ms;
	for (;;) {
		struct pollfd f[2] = { { channel->fd, POLLIN, 0 },
				       { id && id->verbs ? id->verbs->async_fd : -1, POLLIN, 0 } };
		completions();
		poll(f, 2, 10);
		if (f[1].revents & POLLIN) {
			struct ibv_async_event a;
			if (!ibv_get_async_event(id->verbs, &a)) {
				printf("async %s\n", ibv_event_type_str(a.event_type));
				ibv_ack_async_event(&a);
			}
		}
		if (f[0].revents & POLLIN) {
			struct rdma_cm_event *e;
			must(rdma_get_cm_event(channel, &e), "event");
			completions();
			printf("event %s status %d priv %d ird %d ord %d\n",
			       rdma_event_str(e->event) + strlen("RDMA_CM_EVENT_"), e->status,
			       e->param.conn.private_data_len, e->param.conn.responder_resources,
				       e->param.conn.initiator_depth);
			return e;
		}
		if (now() > end)
			return NULL;
	}
}

static void expect(enum rdma_cm_event_type type)
{
	struct rdma_cm_event *e = event(limit);
	if (!e || e->event != type) {
		printf("failed: expected %s\n", rdma_event_str(type));
		exit(1);
	}
	rdma_ack_cm_event(e);
}

static void prepare(void)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 64, 64, 2, 2, 64 } };
	const char *access = option("access", "rw");
	int flags = IBV_ACCESS_LOCAL_WRITE;
	struct ibv_pd *pd = ibv_alloc_pd(id->verbs), *other = ibv_alloc_pd(id->verbs);
	must(!pd || !other, "protection domain");
	cq = ibv_create_cq(id->verbs, 256, NULL, NULL, 0);
	must(!cq, "completion queue");
	attr.send_cq = attr.recv_cq = cq;
	must(rdma_create_qp(id, pd, &attr), "queue pair");
	if (strchr(access, 'w'))
		flags |= IBV_ACCESS_REMOTE_WRITE;
	if (strchr(access, 'r') )
		flags |= IBV_ACCESS_REMOTE_READ;
	for (unsigned i = 0; i < REGION; i++)
		memory[i] = (unsigned char)(i * 7 + i / 256);
	memset(scratch, 0xd7, sizeof scratch);
	region = ibv_reg_mr(number("otherpd", 0) ? other : pd, memory, REGION, flags);
	local = ibv_reg_mr(pd, scratch, sizeof scratch, IBV_ACCESS_LOCAL_WRITE |
			   IBV_ACCESS_REMOTE_WRITE);
	inbox = ibv_reg_mr(pd, messages, sizeof messages, IBV_ACCESS_LOCAL_WRITE);
	must(!region || !local || !inbox, "memory regions");
	long n = number("recvs", 4), len = number("recvlen", 4096);
	for (long i = 0; i < n && i < 64; i++) {
		struct ibv_sge sge = { (uintptr_t)messages + (size_t)i * 65536, (uint32_t)len,
				       inbox->lkey };
		struct ibv_recv_wr wr = { .wr_id = 1000 + (uint64_t)i, .sg_list = &sge,
					  .num_sge = 1 }, *bad;
		must(ibv_post_recv(id->qp, &wr, &bad), "receive");
	}
}

/* Fills in the private data (the region, and then a pattern) and the other connection parameters.
 */
static void fill(struct rdma_conn_param *p, unsigned char *buf, long otherwise)
{
	struct where w = { htobe64((uintptr_t)memory), htonl(region ? region->rkey : 0),
			   htonl(REGION), htobe64(0x7369772070656572) };
	for (int i = 0; i < 256; i++)
		buf[i] = (unsigned char)(i ^ 0x5a);
	memcpy(buf, &w, sizeof w);
	p->private_data = buf;
	p->private_data_len = (uint8_t)number("priv", otherwise);
	p->responder_resources = (uint8_t)number("ird", 4);
	p->initiator_depth = (uint8_t)number("ord", 4);
	p->retry_count = p->rnr_retry_count = 7;
}

/* Reads the peer's region from its private data, and counts wrong octets of the pattern. */
static void learn(const struct rdma_cm_event *e)
{
	const unsigned char *p = e->param.conn.private_data;
	unsigned n = e->param.conn.private_data_len, wrong = 0;
	if (p && n >= sizeof there) {
		memcpy(&there, p, sizeof there);
		there.addr = be64toh(there.addr);
		there.stag = ntohl(there.stag);
		there.len = ntohl(there.len);
		wrong += be64toh(there.mark) != 0x7369772070656572;
		for (unsigned i = sizeof there; i < n; i++)
			wrong += p[i] != (unsigned char)(i ^ 0x5a);
		printf("private data: %u wrong\n", wrong);
	}
}

static void operate(char *op, uint64_t number_)
{
	char *colon = strchr(op, ':'), *plus;
	uint32_t len = colon ? (uint32_t)strtoul(colon + 1, NULL, 0) : 64, stag = there.stag;
	uint64_t addr = there.addr;
	if (colon)
		*colon = 0;
	if ((plus = strchr(op, '+'))) {
		*plus++ = 0;
		if (!strcmp(plus, "stag"))
			stag ^= 0x00550000;
		else if (!strcmp(plus, "end"))
			addr += there.len - len / 2;
		else if (!strcmp(plus, "low"))
			addr -= 4096;
		else
			must(1, plus);
	}
	struct ibv_sge sge = { (uintptr_t)scratch, len, local->lkey };
	struct ibv_send_wr wr = { .wr_id = number_, .sg_list = &sge, .num_sge = 1,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	wr.wr.rdma.remote_addr = addr;
	wr.wr.rdma.rkey = stag;
	if (!strcmp(op, "write"))
		wr.opcode = IBV_WR_RDMA_WRITE;
	else if (!strcmp(op, "read"))
		wr.opcode = IBV_WR_RDMA_READ;
	else if (!strcmp(op, "send"))
		wr.opcode = IBV_WR_SEND;
	else {
		errno = EINVAL;
		must(1, op);
	}
	must(ibv_post_send(id->qp, &wr, &bad), "post");
}

static void converse(void)
{
	char *ops = strdup(option("op", "")), *save = NULL;
	const char *end = option("close", serving ? "peer" : "us");
	struct rdma_cm_event *e;
	unsigned wanted = 0;
	usleep((useconds_t)number("pause", 100) * 1000);
	long start = now();
	for (char *op = strtok_r(ops, ",", &save); op; op = strtok_r(NULL, ",", &save)) {
		if (strcmp(op, "wait"))
			operate(op, (uint64_t)++wanted);
		else
			for (; done < wanted && now() < start + limit; usleep(1000))
				completions();
	}
	if (!strcmp(end, "exit"))
		_exit(0);
	long until = now() + limit;
	if (!strcmp(end, "us")) {
		for (; done < wanted && now() < until; usleep(1000))
			completions();
		if (done < wanted)
			printf("failed: %u completions are missing\n", wanted - done);
		for (long end_ = now() + number("stay", 100); now() < end_; usleep(1000))
			completions();
		rdma_disconnect(id);
	}
	while ((e = event(until > now() ? until - now() : 0))) {
		int over = e->event == RDMA_CM_EVENT_DISCONNECTED;
		rdma_ack_cm_event(e);
		if (over)
			break;
	}
	if (!e)
		printf("failed: never disconnected\n");
	rdma_disconnect(id);
	while ((e = event(200)))
		rdma_ack_cm_event(e);
	unsigned changed = 0;
	for (unsigned i = 0; i < REGION; i++)
		changed += memory[i] != (unsigned char)(i * 7 + i / 256);
	printf("changed %u\n", changed);
}

int main(int argc, char **argv)
{
	struct sockaddr_in at = { .sin_family = AF_INET };
	struct rdma_conn_param param = { 0 };
	struct rdma_cm_event *e;
	unsigned char buf[256];
	if (argc < 4)
		return 2;
	argc_ = argc;
	argv_ = argv;
	serving = !strcmp(argv[1], "serve");
	setvbuf(stdout, NULL, _IOLBF, 0);
	at.sin_port = htons((unsigned short)atoi(argv[3]));
	must(!inet_aton(argv[2], &at.sin_addr), "address");
	limit = number("wait", 10) * 1000;
	must(!(channel = rdma_create_event_channel()), "event channel");
	struct rdma_cm_id *first;
	must(rdma_create_id(channel, &first, NULL, RDMA_PS_TCP), "id");
	if (serving) {
		must(rdma_bind_addr(first, (struct sockaddr *)&at), "bind");
		must(rdma_listen(first, 8), "listen");
		printf("listening\n");
		e = event(limit + 10000);
		must(!e || e->event != RDMA_CM_EVENT_CONNECT_REQUEST, "request");
		learn(e);
		id = e->id;
		if (number("reject", 0)) {
			fill(&param, buf, 0);
			must(rdma_reject(id, param.private_data, param.private_data_len), "reject");
			rdma_ack_cm_event(e);
			usleep(300000);
			printf("rejected\n");
			return 0;
		}
		rdma_ack_cm_event(e);
		prepare();
		fill(&param, buf, sizeof(struct where));
		must(rdma_accept(id, &param), "accept");
		expect(RDMA_CM_EVENT_ESTABLISHED);
	} else {
		must(rdma_resolve_addr(first, NULL, (struct sockaddr *)&at, 3000), "resolve");
		expect(RDMA_CM_EVENT_ADDR_RESOLVED);
		must(rdma_resolve_route(first, 3000), "route");
		expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
		id = first;
		prepare();
		fill(&param, buf, sizeof(struct where));
		must(rdma_connect(id, &param), "connect");
		e = event(limit + 12000);
		must(!e, "reply");
		learn(e);
		enum rdma_cm_event_type kind = e->event;
		rdma_ack_cm_event(e);
		if (kind != RDMA_CM_EVENT_ESTABLISHED)
			return kind == RDMA_CM_EVENT_REJECTED ? 3 : 1;
	}
	converse();
	return 0;
}
