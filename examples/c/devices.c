/* Lesson 2: lists the RDMA devices, opens each, and prints what it can do.
 *
 * usage: devices */
#include "lesson.h"

static void print(struct ibv_context *context)
{
	struct ibv_device_attr device;
	struct ibv_port_attr port;
	union ibv_gid gid;

	check(ibv_query_device(context, &device), "ibv_query_device");
	check(ibv_query_port(context, 1, &port), "ibv_query_port");
	check(ibv_query_gid(context, 1, 0, &gid), "ibv_query_gid");
	printf("%s\n", ibv_get_device_name(context->device));
	printf("  kind              %s\n", ibv_node_type_str(context->device->node_type));
	printf("  port 1            %s\n", ibv_port_state_str(port.state));
	printf("  queue pairs       up to %d\n", device.max_qp);
	printf("  requests in each  up to %d\n", device.max_qp_wr);
	printf("  memory regions    up to %d\n", device.max_mr);
	printf("  GID 0            ");
	for (int i = 0; i < 16; i += 2)
		printf(" %02x%02x", gid.raw[i], gid.raw[i + 1]);
	printf("\n");
}

int main(void)
{
	int count = 0;
	/* NULL, if the kernel does not know RDMA at all. */
	struct ibv_device **list = ibv_get_device_list(&count);

	if (!list || count == 0) {
		printf("there are no RDMA devices\n");
		return 0;
	}
	for (int i = 0; i < count; i++) {
		struct ibv_context *context = created(ibv_open_device(list[i]), "ibv_open_device");

		print(context);
		check(ibv_close_device(context), "ibv_close_device");
	}
	ibv_free_device_list(list);
	return 0;
}
