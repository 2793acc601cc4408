/* Opens a connection through librdmacm with given parameters, and executes individual operations,
 * some of which violate the protocol on purpose.
 *
 * peer serve ADDR PORT [NAME=VALUE...]      peer connect ADDR PORT [NAME=VALUE...]
 *
 *   priv=N       octets of private data to send (default 24: the description of the memory region)
 *   ird=N ord=N  maximum number of inbound (ird) and outbound (ord) Reads in flight (default 4, 4)
 *   reject=1     reject the request (serve)
 *   recvs=N      number of receives to post (default 4); recvlen=N: octets of each (default 4096)
 *   access=LIST  what the peer may do with the region: r, w, rw or none (default rw)
 *   otherpd=1    the region is in another protection domain than the queue pair
 *   op=NAME[:LEN][,...]  operations, in order: write read send, with the suffixes +stag (a bad
 *                STag), +end (across the end), +low (below the start);
 *                e.g. op=write:64,read+end:32
 *                "wait" instead of a name waits until all operations before it are complete
 *   close=us|peer|exit   which side disconnects (default: the connect side);
 *                exit: the process ends without disconnecting
 *   wait=SEC     timeout for each step (default 10)
 *   pause=MS     delay before the first operation (default 100)
 *   stay=MS      delay before we disconnect (default 100)
 *
 * Prints one line per event and completion, and finally "changed N": the number of changed octets
 * of the region. A step that fails prints a line that starts with "failed". Exit status: 3 if the
 * request was rejected, 2 if arguments are missing, 1 if a call failed or an expected event did not
 * come, otherwise 0, even if completions or the final disconnect were missing.
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
struct region_info {
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
static struct region_info peer_region;
static long timeout_ms;
static unsigned done; /* completed operations */

static const char *option(const char *name, const char *fallback)
{
	size_t n = strlen(name);
	for (int i = 4; i < argc_; i++)
		if (!strncmp(argv_[i], name, n) && argv_[i][n] == '=')
			return argv_[i] + n + 1;
	return fallback;
}

static long number(const char *name, long fallback)
{
	const char *text = option(name, NULL);
	return text ? strtol(text, NULL, 0) : fallback;
}

static void fail_if(int bad, const char *what)
{
	if (bad) {
		printf("failed: %s: %s\n", what, strerror(errno));
		exit(1);
	}
}

static long now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Prints the available completions, and counts those of operations (receives have a wr_id from
 * 1000). */
static void drain_cq(void)
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
		drain_cq();
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
			fail_if(rdma_get_cm_event(channel, &e), "event");
			drain_cq();
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
	struct rdma_cm_event *e = event(timeout_ms);
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
	fail_if(!pd || !other, "protection domain");
	cq = ibv_create_cq(id->verbs, 256, NULL, NULL, 0);
	fail_if(!cq, "completion queue");
	attr.send_cq = attr.recv_cq = cq;
	fail_if(rdma_create_qp(id, pd, &attr), "queue pair");
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
	fail_if(!region || !local || !inbox, "memory regions");
	long n = number("recvs", 4), len = number("recvlen", 4096);
	for (long i = 0; i < n && i < 64; i++) {
		struct ibv_sge sge = { (uintptr_t)messages + (size_t)i * 65536, (uint32_t)len,
				       inbox->lkey };
		struct ibv_recv_wr wr = { .wr_id = 1000 + (uint64_t)i, .sg_list = &sge,
					  .num_sge = 1 }, *bad;
		fail_if(ibv_post_recv(id->qp, &wr, &bad), "receive");
	}
}

/* Fills in the private data (the region, and then a pattern) and the other connection parameters.
 */
static void fill(struct rdma_conn_param *p, unsigned char *buf, long default_priv_len)
{
	struct region_info w = { htobe64((uintptr_t)memory), htonl(region ? region->rkey : 0),
				 htonl(REGION), htobe64(0x7369772070656572) };
	for (int i = 0; i < 256; i++)
		buf[i] = (unsigned char)(i ^ 0x5a);
	memcpy(buf, &w, sizeof w);
	p->private_data = buf;
	p->private_data_len = (uint8_t)number("priv", default_priv_len);
	p->responder_resources = (uint8_t)number("ird", 4);
	p->initiator_depth = (uint8_t)number("ord", 4);
	p->retry_count = p->rnr_retry_count = 7;
}

/* Reads the peer's region from its private data, and counts wrong octets of the pattern. */
static void learn(const struct rdma_cm_event *e)
{
	const unsigned char *p = e->param.conn.private_data;
	unsigned n = e->param.conn.private_data_len, wrong = 0;
	if (p && n >= sizeof peer_region) {
		memcpy(&peer_region, p, sizeof peer_region);
		peer_region.addr = be64toh(peer_region.addr);
		peer_region.stag = ntohl(peer_region.stag);
		peer_region.len = ntohl(peer_region.len);
		wrong += be64toh(peer_region.mark) != 0x7369772070656572;
		for (unsigned i = sizeof peer_region; i < n; i++)
			wrong += p[i] != (unsigned char)(i ^ 0x5a);
		printf("private data: %u wrong\n", wrong);
	}
}

static void operate(char *op, uint64_t wr_id)
{
	char *colon = strchr(op, ':'), *plus;
	uint32_t len = colon ? (uint32_t)strtoul(colon + 1, NULL, 0) : 64, stag = peer_region.stag;
	uint64_t addr = peer_region.addr;
	if (colon)
		*colon = 0;
	if ((plus = strchr(op, '+'))) {
		*plus++ = 0;
		if (!strcmp(plus, "stag"))
			stag ^= 0x00550000;
		else if (!strcmp(plus, "end"))
			addr += peer_region.len - len / 2;
		else if (!strcmp(plus, "low"))
			addr -= 4096;
		else
			fail_if(1, plus);
	}
	struct ibv_sge sge = { (uintptr_t)scratch, len, local->lkey };
	struct ibv_send_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1,
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
		fail_if(1, op);
	}
	fail_if(ibv_post_send(id->qp, &wr, &bad), "post");
}

static void converse(void)
{
	char *ops = strdup(option("op", "")), *save = NULL;
	const char *closer = option("close", serving ? "peer" : "us");
	struct rdma_cm_event *e;
	unsigned wanted = 0;
	usleep((useconds_t)number("pause", 100) * 1000);
	long start = now();
	for (char *op = strtok_r(ops, ",", &save); op; op = strtok_r(NULL, ",", &save)) {
		if (strcmp(op, "wait"))
			operate(op, (uint64_t)++wanted);
		else
			for (; done < wanted && now() < start + timeout_ms; usleep(1000))
				drain_cq();
	}
	if (!strcmp(closer, "exit"))
		_exit(0);
	long until = now() + timeout_ms;
	if (!strcmp(closer, "us")) {
		for (; done < wanted && now() < until; usleep(1000))
			drain_cq();
		if (done < wanted)
			printf("failed: %u completions are missing\n", wanted - done);
		for (long stay_end = now() + number("stay", 100); now() < stay_end; usleep(1000))
			drain_cq();
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
	fail_if(!inet_aton(argv[2], &at.sin_addr), "address");
	timeout_ms = number("wait", 10) * 1000;
	fail_if(!(channel = rdma_create_event_channel()), "event channel");
	struct rdma_cm_id *first;
	fail_if(rdma_create_id(channel, &first, NULL, RDMA_PS_TCP), "id");
	if (serving) {
		fail_if(rdma_bind_addr(first, (struct sockaddr *)&at), "bind");
		fail_if(rdma_listen(first, 8), "listen");
		printf("listening\n");
		e = event(timeout_ms + 10000);
		fail_if(!e || e->event != RDMA_CM_EVENT_CONNECT_REQUEST, "request");
		learn(e);
		id = e->id;
		if (number("reject", 0)) {
			fill(&param, buf, 0);
			fail_if(rdma_reject(id, param.private_data, param.private_data_len),
				"reject");
			rdma_ack_cm_event(e);
			usleep(300000);
			printf("rejected\n");
			return 0;
		}
		rdma_ack_cm_event(e);
		prepare();
		fill(&param, buf, sizeof(struct region_info));
		fail_if(rdma_accept(id, &param), "accept");
		expect(RDMA_CM_EVENT_ESTABLISHED);
	} else {
		fail_if(rdma_resolve_addr(first, NULL, (struct sockaddr *)&at, 3000), "resolve");
		expect(RDMA_CM_EVENT_ADDR_RESOLVED);
		fail_if(rdma_resolve_route(first, 3000), "route");
		expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
		id = first;
		prepare();
		fill(&param, buf, sizeof(struct region_info));
		fail_if(rdma_connect(id, &param), "connect");
		e = event(timeout_ms + 12000);
		fail_if(!e, "reply");
		learn(e);
		enum rdma_cm_event_type kind = e->event;
		rdma_ack_cm_event(e);
		if (kind != RDMA_CM_EVENT_ESTABLISHED)
			return kind == RDMA_CM_EVENT_REJECTED ? 3 : 1;
	}
	converse();
	return 0;
}
