// Every kernel that generated code may call.
#pragma once
#include "exchange.h"
