/* Tests of the two faces of a device: an iWARP NIC, or a RoCE NIC if the argument is "roce". With
 * both faces, queue pairs can be connected by each GID, and by a connection manager whose program
 * moves the queue pairs itself. */
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>
#include <unistd.h>

#include "check.h"

enum { LENGTH = 64, TIMEOUT_MS = 20000, GIDS = 256 };
enum { TO_RTR = IBV_QP_STATE | IBV_QP_AV | IBV_QP_DEST_QPN,
       TO_RTR_IB = TO_RTR | IBV_QP_PATH_MTU | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
       	IBV_QP_MIN_RNR_TIMER,
       TO_RTS_IB = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
            IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC };

struct end {
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	char buffer[LENGTH];
};

static int roce;

static struct ibv_qp *new_qp(struct end *e, enum ibv_qp_type type)
{
	struct ibv_qp_init_attr attr = {
		.send_cq = e->cq,
		.recv_cq = e->cq,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = type, .sq_sig_all = 1,
	};

	return ibv_create_qp(e->pd, &attr);
}

static void create_end(struct end *e, struct ibv_context *context)
{
	e->pd = ibv_alloc_pd(context);
	e->cq = ibv_create_cq(context, 32, NULL, NULL, 0);
	NEED(e->pd && e->cq);
	e->mr = ibv_reg_mr(e->pd, e->buffer, LENGTH, IBV_ACCESS_LOCAL_WRITE);
	e->qp = new_qp(e, IBV_QPT_RC);
	NEED(e->mr && e->qp);
}

static void destroy_end(struct end *e)
{
	CODE(0, ibv_destroy_qp(e->qp));
	CODE(0, ibv_destroy_cq(e->cq));
	CODE(0, ibv_dereg_mr(e->mr));
	CODE(0, ibv_dealloc_pd(e->pd));
}

static int post_send(struct end *e)
{
	struct ibv_sge sge = { (uintptr_t)e->buffer, LENGTH, e->mr->lkey };
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .sg_list = &sge, .num_sge = 1 }, *bad;

	return ibv_post_send(e->qp, &wr, &bad);
}

static void expect_completion(struct end *e)
{
	struct ibv_wc wc;
	int n = 0, attempts;

	for (attempts = TIMEOUT_MS; attempts > 0 && n == 0; attempts--) {
		n = ibv_poll_cq(e->cq, 1, &wc);
		usleep(1000);
	}
	NEED(n == 1);
	CODE(IBV_WC_SUCCESS, wc.status);
}

static void receive(struct end *e)
{
	struct ibv_sge sge = { (uintptr_t)e->buffer, LENGTH, e->mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

	memset(e->buffer, 0, LENGTH);
	NEED(ibv_post_recv(e->qp, &wr, &bad) == 0);
}

static void exchange(struct end *from, struct end *to, const char *text)
{
	snprintf(from->buffer, LENGTH, "%s", text);
	CODE(0, post_send(from));
	expect_completion(to);
	expect_completion(from);
	CHECK(strcmp(to->buffer, text) == 0);
}

static void test_devices(struct ibv_device **list, int count)
{
	struct ibv_device **again = ibv_get_device_list(NULL);
	int i, j;

	NEED(again);
	for (i = 0; i < count; i++) {
		CHECK(again[i] == list[i]);
		CHECK(list[i]->node_type == (roce ? IBV_NODE_CA : IBV_NODE_RNIC));
		CHECK(list[i]->transport_type == (roce ? IBV_TRANSPORT_IB : IBV_TRANSPORT_IWARP));
		for (j = 0; j < i; j++) {
			CHECK(ibv_get_device_guid(list[i]) != ibv_get_device_guid(list[j]));
			CHECK(strcmp(ibv_get_device_name(list[i]), ibv_get_device_name(list[j])) != 0);
		}
	}
	ibv_free_device_list(again);
}

/* If the program's header is newer, entries are longer. Fields that the library does not know are
 * zero. */
static void test_longer_entries(struct ibv_context *context, const struct ibv_gid_entry *entries,
	int count)
{
	struct longer {
		struct ibv_gid_entry entry;
		uint64_t later;
	} *table = malloc((count + 1) * sizeof(*table));

	NEED(table);
	memset(table, 0xa5, (count + 1) * sizeof(*table));
	CHECK(_ibv_query_gid_table(context, &table->entry, count, 0, sizeof(*table)) == count);
	for (int i = 0; i < count; i++)
		CHECK(!memcmp(&table[i].entry, entries + i, sizeof(*entries)) && table[i].later == 0);
	CHECK(table[count].later == 0xa5a5a5a5a5a5a5a5);
	CODE(0, _ibv_query_gid_ex(context, 1, entries[0].gid_index, &table[count].entry, 0,
		sizeof(*table)));
	CHECK(!memcmp(&table[count].entry, entries, sizeof(*entries)) && table[count].later == 0);
	free(table);
}

/* Checks the GID table with all query functions. Returns the number of entries. */
static int test_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries)
{
	struct ibv_port_attr port;
	struct ibv_gid_entry entry;
	enum ibv_gid_type_sysfs { V1 = 0, V2 = 1 };
	int ibv_query_gid_type(struct ibv_context *, uint8_t, unsigned int, enum ibv_gid_type_sysfs *);
	uint16_t pkey;
	int count, i;

	NEED(ibv_query_port(context, 1, &port) == 0);
	CHECK(port.link_layer == IBV_LINK_LAYER_ETHERNET && port.sm_lid == 0);
	CHECK(!roce || port.lid == 0);
	CODE(1, port.pkey_tbl_len);
	CODE(0, ibv_query_pkey(context, 1, 0, &pkey));
	CHECK(pkey == 0xffff && ibv_get_pkey_index(context, 1, pkey) == 0);
	count = ibv_query_gid_table(context, entries, GIDS, 0);
	NEED(count > 0 && count <= port.gid_tbl_len);
	/* As in the kernel, a table that is too short is refused. */
	CHECK(ibv_query_gid_table(context, entries, count, 0) == count);
	CHECK(count == 1 || ibv_query_gid_table(context, entries, count - 1, 0) == -EINVAL);
	test_longer_entries(context, entries, count);
	for (i = 0; i < count; i++) {
		struct ibv_gid_entry *e = entries + i;
		union ibv_gid gid;
		enum ibv_gid_type_sysfs type;
		int v1 = roce && e->gid_index % 2 == 0;

		CHECK(e->gid_type == (!roce ? IBV_GID_TYPE_IB : v1
			? IBV_GID_TYPE_ROCE_V1 : IBV_GID_TYPE_ROCE_V2));
		CHECK(e->ndev_ifindex != 0);
		CODE(0, ibv_query_gid_ex(context, 1, e->gid_index, &entry, 0));
		CHECK(memcmp(&entry, e, sizeof(entry)) == 0);
		CODE(0, ibv_query_gid(context, 1, e->gid_index, &gid));
		CHECK(memcmp(&gid, &e->gid, sizeof(gid)) == 0);
		CODE(0, ibv_query_gid_type(context, 1, e->gid_index, &type));
		CHECK(type == (roce && !v1 ? V2 : V1));
		if (roce && !v1)
			CHECK(i > 0 && memcmp(&entries[i - 1].gid, &gid, sizeof(gid)) == 0);
		else
			CHECK(i == 0 || memcmp(&entries[i - 1].gid, &gid, sizeof(gid)) != 0);
	}
	return count;
}

/* A new queue pair of an iWARP NIC accepts receives. A RoCE NIC refuses them before INIT. */
static void test_receive_in_reset(struct end *e)
{
	struct ibv_sge sge = { (uintptr_t)e->buffer, LENGTH, e->mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad = NULL;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	struct ibv_qp_init_attr init;

	CODE(roce ? EINVAL : 0, ibv_post_recv(e->qp, &wr, &bad));
	if (!roce)
		return;
	CHECK(bad == &wr);
	CODE(0, ibv_query_qp(e->qp, &attr, IBV_QP_STATE, &init));
	CODE(IBV_QPS_RESET, attr.qp_state);
	attr.qp_state = IBV_QPS_RTR;
	CODE(EINVAL, ibv_modify_qp(e->qp, &attr, TO_RTR_IB));
}

static void to_init(struct end *e)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

	CODE(roce ? EINVAL : 0, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE));
	CODE(0, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		IBV_QP_ACCESS_FLAGS));
}

/* A RoCE NIC requires all attributes of InfiniBand. An iWARP NIC requires only the peer's address
 * and number. */
static void connect_by_number(struct end *e, struct end *peer, const struct ibv_gid_entry *gid)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .dest_qp_num = peer->qp->qp_num,
		.path_mtu = IBV_MTU_1024 };

	attr.ah_attr.is_global = 1;
	attr.ah_attr.port_num = 1;
	attr.ah_attr.grh.dgid = gid->gid;
	attr.ah_attr.grh.sgid_index = 254;
	CODE(EINVAL, ibv_modify_qp(e->qp, &attr, TO_RTR_IB));
	attr.ah_attr.grh.sgid_index = gid->gid_index;
	if (roce)
		CODE(EINVAL, ibv_modify_qp(e->qp, &attr, TO_RTR));
	CODE(0, ibv_modify_qp(e->qp, &attr, roce ? TO_RTR_IB : TO_RTR));
	CODE(EINVAL, post_send(e));
	attr.qp_state = IBV_QPS_RTS;
	CODE(0, ibv_modify_qp(e->qp, &attr, roce ? TO_RTS_IB : IBV_QP_STATE));
}

static void test_connection_by_number(struct ibv_context *context, const struct ibv_gid_entry *gid)
{
	struct end a = { 0 }, b = { 0 };

	create_end(&a, context);
	create_end(&b, context);
	to_init(&a);
	to_init(&b);
	receive(&a);
	receive(&b);
	connect_by_number(&a, &b, gid);
	connect_by_number(&b, &a, gid);
	exchange(&a, &b, "there");
	exchange(&b, &a, "and back");
	destroy_end(&a);
	destroy_end(&b);
}

static struct rdma_cm_id *next_event(struct rdma_event_channel *channel,
	enum rdma_cm_event_type want)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	NEED(rdma_get_cm_event(channel, &event) == 0);
	if (event->event != want)
		fprintf(stderr, "%s instead of %s\n", rdma_event_str(event->event), rdma_event_str(want));
	CHECK(event->event == want);
	id = event->id;
	NEED(rdma_ack_cm_event(event) == 0);
	return id;
}

static void move_to(struct rdma_cm_id *id, struct end *e, enum ibv_qp_state state, int ib_mask)
{
	struct ibv_qp_attr attr = { .qp_state = state };
	int mask = 0;

	CODE(0, rdma_init_qp_attr(id, &attr, &mask));
	if (roce)
		CHECK((mask & ib_mask) == ib_mask);
	if (roce && state == IBV_QPS_RTR)
		CHECK(attr.ah_attr.is_global && memcmp(&attr.ah_attr.grh.dgid, &id->route.addr.addr.ibaddr.dgid,
			16) == 0);
	CODE(0, ibv_modify_qp(e->qp, &attr, mask));
}

static void move_to_rts(struct rdma_cm_id *id, struct end *e)
{
	move_to(id, e, IBV_QPS_RTR, TO_RTR_IB);
	move_to(id, e, IBV_QPS_RTS, TO_RTS_IB);
}

static void check_path(struct rdma_cm_id *id)
{
	struct ibv_sa_path_rec *path = id->route.path_rec;

	CODE(roce, id->route.num_paths);
	if (roce && path)
		CHECK(path->pkey == 0xffff && memcmp(&path->dgid, &id->route.addr.addr.ibaddr.dgid, 16) == 0);
	CHECK(roce == (path != NULL));
}

/* Neither identifier has a queue pair: the program creates queue pairs, moves them, and passes
 * their numbers. */
static void test_manager_without_queue_pairs(void)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_conn_param param = { 0 };
	struct rdma_cm_id *listener, *client, *server;
	struct end a = { 0 }, b = { 0 };

	NEED(channel && rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) == 0);
	NEED(rdma_bind_addr(listener, (struct sockaddr *)&addr) == 0 && rdma_listen(listener, 1) == 0);
	addr.sin_port = rdma_get_src_port(listener);
	NEED(rdma_create_id(channel, &client, NULL, RDMA_PS_TCP) == 0);
	NEED(rdma_resolve_addr(client, NULL, (struct sockaddr *)&addr, 1000) == 0);
	next_event(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	NEED(rdma_resolve_route(client, 1000) == 0);
	next_event(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
	check_path(client);
	create_end(&a, client->verbs);
	move_to(client, &a, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT);
	receive(&a);
	param.qp_num = a.qp->qp_num;
	NEED(rdma_connect(client, &param) == 0);
	server = next_event(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	check_path(server);
	create_end(&b, server->verbs);
	move_to(server, &b, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT);
	receive(&b);
	move_to_rts(server, &b);
	param.qp_num = b.qp->qp_num;
	NEED(rdma_accept(server, &param) == 0);
	next_event(channel, RDMA_CM_EVENT_CONNECT_RESPONSE);
	move_to_rts(client, &a);
	NEED(rdma_establish(client) == 0);
	next_event(channel, RDMA_CM_EVENT_ESTABLISHED);
	exchange(&a, &b, "through the manager");
	exchange(&b, &a, "and back");
	/* Both ends get an event. */
	NEED(rdma_disconnect(client) == 0);
	next_event(channel, RDMA_CM_EVENT_DISCONNECTED);
	next_event(channel, RDMA_CM_EVENT_DISCONNECTED);
	NEED(rdma_destroy_id(client) == 0 && rdma_destroy_id(server) == 0 &&
		rdma_destroy_id(listener) == 0);
	destroy_end(&a);
	destroy_end(&b);
	rdma_destroy_event_channel(channel);
}

/* A queue pair from rdma_create_qp is in INIT, so it accepts receives before it is connected. */
static void test_manager_creates_queue_pair(void)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC, };
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct ibv_recv_wr wr = { 0 }, *bad;
	struct ibv_qp_attr attr;
	struct rdma_cm_id *id;

	NEED(channel && rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	/* The port does not matter, because no connection is established. */
	addr.sin_port = htons(9);
	NEED(rdma_resolve_addr(id, NULL, (struct sockaddr *)&addr, 1000) == 0);
	next_event(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	NEED(rdma_create_qp(id, NULL, &init) == 0);
	CODE(IBV_QPS_INIT, id->qp->state);
	CODE(0, ibv_query_qp(id->qp, &attr, IBV_QP_STATE, &init));
	CODE(IBV_QPS_INIT, attr.qp_state);
	CODE(0, ibv_post_recv(id->qp, &wr, &bad));
	rdma_destroy_qp(id);
	NEED(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(channel);
}

int main(int argc, char **argv)
{
	struct ibv_gid_entry entries[GIDS];
	struct ibv_context *context;
	struct ibv_device **list;
	struct end a = { 0 };
	int count, i;

	roce = argc > 1 && strcmp(argv[1], "roce") == 0;
	list = ibv_get_device_list(&count);
	NEED(list && count > 0);
	test_devices(list, count);
	context = ibv_open_device(list[0]);
	NEED(context);
	ibv_free_device_list(list);
	count = test_gid_table(context, entries);
	for (i = 0; i < count; i++)
		test_connection_by_number(context, entries + i);
	create_end(&a, context);
	IS_NULL(EOPNOTSUPP, new_qp(&a, IBV_QPT_RAW_PACKET));
	IS_NULL(EOPNOTSUPP, new_qp(&a, IBV_QPT_RAW_PACKET));
	test_receive_in_reset(&a);
	destroy_end(&a);
	CODE(0, ibv_close_device(context));
	test_manager_without_queue_pairs();
	test_manager_creates_queue_pair();
	return result();
}
